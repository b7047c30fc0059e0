/* A wall clock that tests can step: LD_PRELOAD this, with STEPPED_CLOCK naming a file of eight bytes, the
 * seconds to add (int64). Only the wall clock moves; the monotonic ones are the kernel's own. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *step;

__attribute__((constructor)) static void open_step(void) {
  const char *path = getenv("STEPPED_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) step = page;
}

static int64_t added(void) { return step ? *step : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += added();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
