/* Another boot of the same machine, for some processes: LD_PRELOAD this, with ANOTHER_BOOT naming a file that is
 * opened in place of the kernel's boot id. (A mount over that file would mask /proc: no sandbox could mount its own.) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int opened(int directory, const char *path, int flags, int mode) {
  const char *other = getenv("ANOTHER_BOOT");
  if (other && !strcmp(path, "/proc/sys/kernel/random/boot_id")) path = other;
  return syscall(SYS_openat, directory, path, flags, mode);
}

#define MODE(last)             \
  va_list more;                \
  va_start(more, last);        \
  int mode = va_arg(more, int); \
  va_end(more);

int open(const char *path, int flags, ...) {
  MODE(flags)
  return opened(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  MODE(flags)
  return opened(AT_FDCWD, path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
  MODE(flags)
  return opened(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) {
  MODE(flags)
  return opened(directory, path, flags, mode);
}
