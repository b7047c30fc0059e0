"""What copies files into a build sandbox, and out of an earlier stage: programs for its shell."""

COPY = r"""
set -e
unpack=$1 target=$2 mode=$3 archives=$4; shift 4
context=$(mktemp -d)
trap 'chmod -R u+rwx "$context"; rm -rf "$context"' EXIT  # also where it fails: another user may try again
tar "$unpack" - -C "$context" --no-same-owner --ignore-zeros
IFS=  # names may have spaces; the marks of a pattern still mean what they mean
many=0
for source; do for found in "$context"/$source; do
  [ -e "$found" ] || [ -L "$found" ] || { echo "$source: not in the build context" >&2; exit 1; }
  many=$((many + 1))
done; done
change() { [ -z "$mode" ] || [ -L "$1" ] || chmod "$mode" "$1"; }
for source; do for found in "$context"/$source; do
  if [ -d "$found" ] && [ ! -L "$found" ]; then
    mkdir -p "$target"; cp -RP "$found/." "$target/"
    [ -z "$mode" ] || (cd "$found"; export mode target; find . ! -name . ! -type l -exec sh -ec '
      for one; do chmod "$mode" "$target/$one"; done' sh {} +)
  elif [ -n "$archives" ] && [ -f "$found" ] && [ -s "$found" ] && tar -tf "$found" >/dev/null 2>&1; then
    mkdir -p "$target"; tar -xf "$found" -C "$target" --no-same-owner
  elif [ "$many" -gt 1 ] || [ -d "$target" ] || [ "${target%/}" != "$target" ]; then
    mkdir -p "$target"; cp -RP "$found" "$target/"; change "$target/${found##*/}"
  else mkdir -p "$(dirname "$target")"; cp -RP "$found" "$target"; change "$target"; fi
done; done
"""

TAKE = """cd / && IFS= && for word; do shift; set -- "$@" $word; done && exec tar --one-file-system -cf - -- "$@" """
