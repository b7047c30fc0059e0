# bash without a terminal: variables, functions and the directory are kept.
__lt_r=$1 __lt_w=$2 __lt_n=$3
set --
exec </dev/null
while IFS= read -r -d '' -u "$__lt_r" __lt_c; do
  eval "$__lt_c"
  __lt_s=$?
  builtin printf '\036%s\037' "$__lt_n"
  builtin printf '\036%s\037' "$__lt_n" >&2
  builtin printf '{"status": %d}\n' "$__lt_s" >&"$__lt_w"
done
