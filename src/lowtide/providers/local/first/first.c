/* Process 1 of a sandbox: makes the working directory, says "ready", then reaps for ever or waits for the main command.

   It is executed from a sealed file that may be executed and not read, so that the kernel keeps it undumpable from
   its first instruction on: nothing beside it can read, write or trace it, and there is no file of the host behind it.
   It has a session of its own: a signal to "the own process group" from inside does not reach the outer bubblewrap,
   whose alarm is the sandbox's lifetime. */
typedef unsigned long ul;
#if defined(__x86_64__)
#define NR_read 0
#define NR_write 1
#define NR_fstat 5
#define NR_rt_sigaction 13
#define NR_rt_sigprocmask 14
#define NR_pwrite64 18
#define NR_clone 56
#define NR_execve 59
#define NR_wait4 61
#define NR_fcntl 72
#define NR_chdir 80
#define NR_setsid 112
#define NR_prctl 157
#define NR_exit_group 231
#define NR_mkdirat 258
#define NR_ppoll 271
#define NR_signalfd4 289
#define NR_dup3 292
#define NR_pipe2 293
#define NR_prlimit64 302
static inline long sys(long n, long a, long b, long c, long d, long e) {
  long r;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
  return r;
}
__asm__(".globl _start\n_start: mov %rsp,%rdi\n and $-16,%rsp\n call begin\n");
#else
#define NR_mkdirat 34
#define NR_dup3 24
#define NR_fcntl 25
#define NR_chdir 49
#define NR_pipe2 59
#define NR_read 63
#define NR_write 64
#define NR_pwrite64 68
#define NR_ppoll 73
#define NR_signalfd4 74
#define NR_fstat 80
#define NR_exit_group 94
#define NR_rt_sigaction 134
#define NR_rt_sigprocmask 135
#define NR_setsid 157
#define NR_prctl 167
#define NR_clone 220
#define NR_execve 221
#define NR_wait4 260
#define NR_prlimit64 261
static inline long sys(long n, long a, long b, long c, long d, long e) {
  register long x8 __asm__("x8") = n;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
  return x0;
}
__asm__(".globl _start\n_start: mov x0,sp\n bl begin\n");
#endif
#define NR_close_range 436

#define READY 6 /* as the spawner leaves them open */
#define PLACE 10 /* a file of the sandbox's directory, which cannot be read or written by it */
#define IDS 11 /* the lock on its range of ids, which ends with it */
#define LOG 1 /* a file of the sandbox's directory: what the main command printed last, see ../logs.py */
#define PIECE 65536
#define RING ((1 << 20) + PIECE) /* then comes, in 8 bytes, how much was printed in all */
#define LOOK_SECONDS 5
#define HERE -100
#define MISSING(error) ((error) == -2 || (error) == -20) /* ENOENT, ENOTDIR */

__attribute__((noreturn)) static void leave(long code) {
  for (;;) sys(NR_exit_group, code, 0, 0, 0, 0);
}

__attribute__((noreturn)) static void fail(const char *why) {
  long length = 0;
  while (why[length]) length++;
  sys(NR_write, 2, (long)why, length, 0, 0);
  leave(1);
}

static ul number(const char *digits) {
  ul value = 0;
  for (; *digits; digits++) value = value * 10 + (ul)(*digits - '0');
  return value;
}

/* Here, after the root has changed: a link in a path leads nowhere but into the sandbox. */
static void make_directory(char *path) {
  for (char *at = path; *at; at++) {
    if (*at != '/' || at == path) continue;
    *at = 0;
    sys(NR_mkdirat, HERE, (long)path, 0755, 0, 0);
    *at = '/';
  }
  sys(NR_mkdirat, HERE, (long)path, 0755, 0, 0);
  if (sys(NR_chdir, (long)path, 0, 0, 0, 0) < 0) fail("lowtide: the working directory cannot be made or entered\n");
}

/* Whoever removes the state directory takes with it all that says what this is: nobody could end it then but itself. */
static void leave_without_place(void) {
  unsigned stat[64];
  if (sys(NR_fstat, PLACE, (long)stat, 0, 0, 0) < 0) return;
#if defined(__x86_64__)
  if (*(ul *)(stat + 4) == 0) leave(0);
#else
  if (stat[5] == 0) leave(0);
#endif
}

/* Until one of them (none: -1) is readable, or it is time to look. */
static void sleep_a_while(int fd, int other) {
  struct { int fd; short events, revents; } two[2] = {{fd, 1, 0}, {other, 1, 0}};
  long moment[2] = {LOOK_SECONDS, 0};
  sys(NR_ppoll, (long)two, 2, (long)moment, 0, 0);
}

/* What waits in the pipe into the log, over the oldest there: at most as much as the log holds. Returns the pipe; -1
   when nobody can write into it any more. What a full disk does not take is lost, and nobody waits for it. */
static int keep_printed(int pipe) {
  static char data[PIECE];
  static ul printed;
  for (int rounds = 0; pipe >= 0 && rounds < RING / PIECE; rounds++) {
    long n = sys(NR_read, pipe, (long)data, PIECE, 0, 0);
    if (n == 0) return -1;
    if (n < 0) break;
    for (long at = 0, wrote; at < n; at += wrote, printed += (ul)wrote) {
      long left = RING - (long)(printed % RING);
      wrote = sys(NR_pwrite64, LOG, (long)(data + at), n - at < left ? n - at : left, (long)(printed % RING), 0);
      if (wrote <= 0) break;
    }
    sys(NR_pwrite64, LOG, (long)&printed, sizeof printed, RING, 0);
  }
  return pipe;
}

/* Execute what is found along `dirs`. Comes back with why not. */
static long search(char **argv, char **envp, const char *dirs) {
  char full[4352], *file = argv[0];
  int slash = 0, length = 0;
  long failure = -2;
  for (; file[length]; length++) slash |= file[length] == '/';
  if (slash) return sys(NR_execve, (long)file, (long)argv, (long)envp, 0, 0);
  while (*dirs) {
    int n = 0;
    while (*dirs && *dirs != ':') {
      if (n < 4000) full[n++] = *dirs;
      dirs++;
    }
    if (*dirs) dirs++;
    full[n++] = '/';
    for (int k = 0; k <= length && n < 4351; k++) full[n++] = file[k];
    full[n - 1] = 0;
    long result = sys(NR_execve, (long)full, (long)argv, (long)envp, 0, 0);
    if (!MISSING(result)) failure = result;
  }
  return failure;
}

/* argv: NAME idle NPROC DIRECTORY
       | NAME wait NPROC DIRECTORY: the same once a byte has come on READY, a socket; ends when its other end is closed
       | NAME run NPROC DIRECTORY PATH COMMAND...: the command is process 2, and its end is the sandbox's.
         'R' on READY, which is closed when it runs; 'E' before that when it cannot be run
       | NAME exec FILE COMMAND...: no process 1; FILE is executed as COMMAND... */
__attribute__((noreturn, used)) void begin(long *stack) {
  char **argv = (char **)(stack + 1), **envp = argv + stack[0] + 1;
  char mode = stack[0] > 3 ? argv[1][0] : 0, mark = 'R';
  if (mode == 'e') {
    long failure = sys(NR_execve, (long)argv[2], (long)(argv + 3), (long)envp, 0, 0);
    leave(MISSING(failure) ? 127 : 126);
  }
  if (mode != 'i' && mode != 'w' && (mode != 'r' || stack[0] < 6)) leave(126);
  sys(NR_prctl, 15, (long)"lowtide", 0, 0, 0); /* PR_SET_NAME */
  sys(NR_prctl, 4, 0, 0, 0, 0); /* PR_SET_DUMPABLE: where the file could be read after all */
  sys(NR_setsid, 0, 0, 0, 0, 0);
  make_directory(argv[3]);
  ul limit[2];
  limit[0] = limit[1] = number(argv[2]);
  if (limit[0]) sys(NR_prlimit64, 0, 6, (long)limit, 0, 0); /* here and not earlier: counted per user namespace */
  sys(NR_close_range, 3, READY - 1, 0, 0, 0);
  sys(NR_close_range, READY + 1, PLACE - 1, 0, 0, 0);
  sys(NR_close_range, PLACE, IDS, 4, 0, 0); /* on exec */
  sys(NR_close_range, IDS + 1, 0x7fffffff, 0, 0, 0);
  sys(NR_dup3, 0, 2, 0, 0, 0);
  if (mode != 'r') {
    ul ignore[4] = {1, 0, 0, 0}; /* SIGCHLD ignored: the kernel reaps what is left to process 1 */
    sys(NR_rt_sigaction, 17, (long)ignore, 0, 8, 0);
    sys(NR_write, READY, (long)&mark, 1, 0, 0);
    if (mode == 'w' && sys(NR_read, READY, (long)&mark, 1, 0, 0) != 1) leave(0);
    sys(NR_close_range, READY, READY, 0, 0, 0);
    for (;;) {
      sleep_a_while(-1, -1);
      leave_without_place();
    }
  }
  sys(NR_write, READY, (long)&mark, 1, 0, 0);
  ul ended = 1UL << 16, before = 0; /* SIGCHLD */
  sys(NR_rt_sigprocmask, 0, (long)&ended, (long)&before, 8, 0);
  long news = sys(NR_signalfd4, -1, (long)&ended, 8, 02000000 | 04000, 0); /* close-on-exec, without waiting */
  int pipe[2] = {-1, LOG};
  if (sys(NR_pipe2, (long)pipe, 02000000, 0, 0, 0) < 0) leave(1);
  sys(NR_fcntl, pipe[0], 4, 04000, 0, 0); /* F_SETFL: without waiting, on this end only */
  long child = sys(NR_clone, 17, 0, 0, 0, 0);
  if (child == 0) {
    sys(NR_rt_sigprocmask, 2, (long)&before, 0, 8, 0);
    sys(NR_setsid, 0, 0, 0, 0, 0);
    sys(NR_dup3, pipe[1], 1, 0, 0, 0); /* one pipe for both: in the order in which it prints */
    sys(NR_dup3, pipe[1], 2, 0, 0, 0);
    sys(NR_close_range, READY, READY, 4, 0, 0); /* on exec */
    long failure = search(argv + 5, envp, argv[4]);
    mark = 'E';
    sys(NR_write, READY, (long)&mark, 1, 0, 0);
    leave(MISSING(failure) ? 127 : 126);
  }
  sys(NR_close_range, READY, READY, 0, 0, 0);
  sys(NR_close_range, pipe[1], pipe[1], 0, 0, 0);
  if (news < 0) leave(1);
  for (;;) {
    int status = 0;
    char info[128];
    long gone = sys(NR_wait4, -1, (long)&status, 1, 0, 0); /* WNOHANG */
    pipe[0] = keep_printed(pipe[0]);
    if (gone == child) leave(status & 0x7f ? 128 + (status & 0x7f) : (status >> 8) & 0xff);
    if (gone == -10) leave(1); /* ECHILD: it could not be made */
    if (gone != 0) continue;
    sleep_a_while((int)news, pipe[0]);
    while (sys(NR_read, news, (long)info, sizeof info, 0, 0) > 0) {}
    leave_without_place();
  }
}
