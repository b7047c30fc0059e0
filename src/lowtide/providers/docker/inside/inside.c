/* The one program lowtide brings into a container: PID 1, the parent of each command, and file calls.
 *
 * It is freestanding (no libc, a few kilobytes, static), so that it runs in any Linux image, also one
 * without a shell, and it is mounted read-only. Built by `build.py` beside it.
 *
 *   init SECONDS [COMMAND...]        PID 1: reaps, passes signals on, and ends everything at the deadline
 *   run TOKEN -|tROWSxCOLUMNS CWD COMMAND...   the parent of one command: says its exit code in-band, adopts its orphans
 *   serve                            starts commands on request, many at once, over one pair of streams
 *   signal TOKEN NUMBER              to the process group of that command
 *   end TOKEN GRACE_MS               TERM, grace, KILL to everything that descends from it
 *   read PATH | write PATH MODE | stat PATH | list PATH | mkdir PATH | remove PATH RECURSIVE
 *   connect PORT                     standard input and output to a TCP port of the container
 *
 * Whoever runs in the container is hostile: PID 1 cannot be signalled or stopped from inside its PID
 * namespace, is not dumpable (no ptrace, no /proc/1/fd), and takes a new deadline only from its own
 * standard input, which only the engine can write to.
 */
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/signal.h>
#include <linux/stat.h>
#include <linux/time.h>
#include <linux/wait.h>
#include <asm/ioctls.h>
#include <asm/unistd.h>

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;

#define AT_CWD (-100)
#define CLOCK_BOOT 7 /* goes on while the machine sleeps */
#define EXPIRED 124

/* -- the kernel ---------------------------------------------------------------------------------- */

#if defined(__x86_64__)
__asm__(".globl _start\n_start:\n xor %ebp,%ebp\n mov %rsp,%rdi\n and $-16,%rsp\n call begin\n");
static long sys(long n, long a, long b, long c, long d, long e, long f)
{
	long r;
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return r;
}
#elif defined(__aarch64__)
__asm__(".globl _start\n_start:\n mov x29,#0\n mov x0,sp\n bl begin\n");
static long sys(long n, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = n, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c,
		x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}
#else
#error "this architecture has no system call glue here yet"
#endif
#define S6(n, a, b, c, d, e, f, ...) sys(__NR_##n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define K(n, ...) S6(n, ##__VA_ARGS__, 0, 0, 0, 0, 0, 0)

void *memset(void *to, int value, u64 n) { u8 *p = to; while (n--) *p++ = value; return to; }
void *memcpy(void *to, const void *from, u64 n) { u8 *p = to; const u8 *q = from; while (n--) *p++ = *q++; return to; }

static u64 length(const char *s) { u64 n = 0; while (s[n]) n++; return n; }
static int same(const char *a, const char *b) { while (*a && *a == *b) a++, b++; return *a == *b; }
static long number(const char *s) { long n = 0; while (*s >= '0' && *s <= '9') n = n * 10 + (*s++ - '0'); return n; }
static char *put(char *to, const char *s) { while (*s) *to++ = *s++; *to = 0; return to; }
static char *put_number(char *to, long n)
{
	char digits[24]; int i = 0;
	if (n < 0) { *to++ = '-'; n = -n; }
	do digits[i++] = '0' + n % 10; while (n /= 10);
	while (i) *to++ = digits[--i];
	*to = 0;
	return to;
}
static __attribute__((noreturn)) void leave(int code) { for (;;) K(exit_group, code); }

static int write_all(int fd, const void *data, u64 n)
{
	const u8 *p = data;
	while (n) {
		long done = K(write, fd, p, n);
		if (done == -EINTR) continue;
		if (done == -EAGAIN) { struct pollfd w = {.fd = fd, .events = POLLOUT}; K(ppoll, &w, 1, 0, 0, 0); continue; }
		if (done <= 0) return -1;
		p += done; n -= done;
	}
	return 0;
}
static int read_all(int fd, void *data, u64 n)
{
	u8 *p = data;
	while (n) {
		long done = K(read, fd, p, n);
		if (done == -EINTR) continue;
		if (done <= 0) return -1;
		p += done; n -= done;
	}
	return 0;
}
static void say(int fd, const char *s) { write_all(fd, s, length(s)); }

static long now_ms(void)
{
	struct { long sec, nsec; } t;
	K(clock_gettime, CLOCK_BOOT, &t);
	return t.sec * 1000 + t.nsec / 1000000;
}
static void sleep_ms(long ms)
{
	struct { long sec, nsec; } t = {ms / 1000, ms % 1000 * 1000000};
	K(nanosleep, &t, 0);
}
static void block_signals(int yes)
{
	u64 mask = yes ? ~0UL : 0;
	K(rt_sigprocmask, SIG_SETMASK, &mask, 0, 8);
}
static int exit_code(int status) { return (status & 0x7f) ? 128 + (status & 0x7f) : (status >> 8) & 0xff; }

/* -- starting a command -------------------------------------------------------------------------- */

static char **environment;

static const char *variable(const char *name)
{
	u64 n = length(name);
	for (char **e = environment; *e; e++) {
		u64 i = 0;
		while (i < n && (*e)[i] == name[i]) i++;
		if (i == n && (*e)[n] == '=') return *e + n + 1;
	}
	return 0;
}

static __attribute__((noreturn)) void execute(char **argv)
{
	static char path[8192];
	const char *name = argv[0], *rest = variable("PATH");
	long error = -ENOENT;
	int slash = 0;
	for (const char *p = name; *p; p++) slash |= *p == '/';
	if (slash) {
		error = K(execve, name, argv, environment);
	} else if (*name) {
		if (!rest || !*rest) rest = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
		while (rest) {
			u64 n = 0;
			while (rest[n] && rest[n] != ':') n++;
			if (n + length(name) + 2 < sizeof path) {
				memcpy(path, rest, n);
				char *p = path + n;
				if (n) *p++ = '/';
				put(p, name);
				long e = K(execve, path, argv, environment);
				if (e != -ENOENT && e != -ENOTDIR) error = e; /* keep looking, remember the better reason */
			}
			rest = rest[n] ? rest + n + 1 : 0;
		}
	}
	int missing = error == -ENOENT || error == -ENOTDIR;
	say(2, "lowtide: "); say(2, name);
	say(2, missing ? ": command not found\n" : error == -EACCES ? ": permission denied\n" : error == -E2BIG ? ": argument list too long\n" : ": cannot be executed\n");
	leave(missing ? 127 : 126);
}

/* -- init: PID 1 --------------------------------------------------------------------------------- */

static void init(int argc, char **argv)
{
	long lifetime = number(argv[0]), deadline = lifetime ? now_ms() + lifetime * 1000 : 0, child = 0;
	int ending = 0, listening = 1, filled = 0;
	char line[64];
	u64 all = ~0UL;
	K(prctl, PR_SET_DUMPABLE, 0);
	block_signals(1);
	if (argc > 1) {
		child = K(clone, SIGCHLD);
		if (child == 0) {
			long null = K(openat, AT_CWD, "/dev/null", O_RDONLY);
			if (null < 0) K(close, 0);
			else if (null > 0) { K(dup3, null, 0, 0); K(close, null); }
			K(setsid);
			block_signals(0);
			execute(argv + 1);
		}
		if (child < 0) leave(126);
	}
	long signals = K(signalfd4, -1, &all, 8, O_CLOEXEC | O_NONBLOCK);
	for (;;) {
		struct pollfd w[2] = {{.fd = signals, .events = POLLIN}, {.fd = listening ? 0 : -1, .events = POLLIN}};
		long left = -1;
		if (deadline) {
			left = deadline - now_ms();
			if (left <= 0) { say(2, "lowtide: the sandbox's lifetime is over\n"); leave(EXPIRED); }
		}
		/* Processes that came in through the engine are not children of PID 1: look whether any is left. */
		if (ending && (left < 0 || left > 10)) left = 10;
		struct { long sec, nsec; } t = {left / 1000, left % 1000 * 1000000};
		K(ppoll, w, 2, left < 0 ? 0 : (void *)&t, 0, 0);

		u8 info[128];
		while (K(read, signals, info, sizeof info) == sizeof info) {
			u32 which = *(u32 *)info;
			if (which == SIGCHLD) {
				int status; long pid;
				while ((pid = K(wait4, -1, &status, WNOHANG, 0)) > 0)
					if (pid == child) leave(exit_code(status));
			} else if (child) {
				K(kill, child, which);
			} else if (which == SIGTERM || which == SIGINT || which == SIGQUIT) {
				ending = 1;
				K(kill, -1, SIGTERM);
				K(kill, -1, SIGCONT);
			}
		}
		if (ending) {
			int status;
			while (K(wait4, -1, &status, WNOHANG, 0) > 0) {}
			if (K(kill, -1, 0) == -ESRCH) leave(0);
		}
		if (w[1].revents) {
			long n = K(read, 0, line + filled, sizeof line - 1 - filled);
			if (n <= 0) { listening = n == -EINTR || n == -EAGAIN; continue; }
			filled += n;
			line[filled] = 0;
			for (int i = 0; i < filled; i++) {
				if (line[i] != '\n') continue;
				long seconds = number(line);
				if (seconds > 0) {
					deadline = now_ms() + seconds * 1000;
					if (!child) { char out[64]; *put(put_number(put(out, "renewed "), seconds), "\n") = 0; say(1, out); }
				}
				filled -= i + 1;
				memcpy(line, line + i + 1, filled + 1);
				i = -1;
			}
			if (filled >= (int)sizeof line - 1) filled = 0;
		}
	}
}

/* -- run: the parent of one command -------------------------------------------------------------- */

/* Reaps until the command has ended; its exit code. `end` asks with SIGUSR1 to stay until every orphan is
 * gone too, or they would escape to PID 1. */
static int supervise(long child)
{
	int code = -1, status;
	char name[16];
	put_number(name, child);
	K(prctl, PR_SET_NAME, name); /* `signal` and `end` read it from our stat line */
	for (;;) {
		long pid = K(wait4, -1, &status, 0, 0);
		if (pid == child) code = exit_code(status);
		if (pid == -ECHILD) break;
		if (code >= 0) {
			u64 pending = 0;
			K(rt_sigpending, &pending, 8);
			if (!(pending & (1UL << (SIGUSR1 - 1)))) break;
		}
	}
	return code < 0 ? 255 : code;
}

static __attribute__((noreturn)) void become(const char *cwd, char **argv)
{
	block_signals(0);
	if (*cwd && K(chdir, cwd) < 0) {
		say(2, "lowtide: cannot enter the working directory "); say(2, cwd); say(2, "\n");
		leave(126);
	}
	execute(argv);
}

static void run(char **argv)
{
	const char *token = argv[0];
	int tty = argv[1][0] == 't';
	block_signals(1);
	K(prctl, PR_SET_CHILD_SUBREAPER, 1);
	if (tty) { /* before the command can ask for it */
		const char *by = argv[1] + 1;
		unsigned short size[4] = {number(by), 0, 0, 0};
		while (*by && *by != 'x') by++;
		if (*by) size[1] = number(by + 1);
		K(ioctl, 0, TIOCSWINSZ, size);
	}
	long child = K(clone, SIGCHLD);
	if (child == 0) {
		if (tty) {
			int group = K(getpid);
			K(setpgid, 0, 0);
			K(ioctl, 0, TIOCSPGRP, &group);
		} else {
			K(setsid);
		}
		become(argv[2], argv + 3);
	}
	if (child < 0) { say(2, "lowtide: no more processes can be started here\n"); leave(126); }
	K(close, 0);
	int code = supervise(child);
	char out[80], *p = out;
	*p++ = (char)0xff;
	p = put(p, token);
	*p++ = '0' + code / 100; *p++ = '0' + code / 10 % 10; *p++ = '0' + code % 10;
	/* On both streams: they travel apart, and each ends for the reader where it says so. */
	write_all(1, out, p - out);
	if (!tty) write_all(2, out, p - out);
	leave(code);
}

/* -- signal, end: other people's view of `run` --------------------------------------------------- */

#define MOST 32768
static int pids[MOST], parents[MOST];
static u8 dead[MOST], under[MOST];

static long slurp(int pid, const char *file, char *to, long n)
{
	char path[64];
	put(put(put_number(put(path, "/proc/"), pid), "/"), file);
	long fd = K(openat, AT_CWD, path, O_RDONLY);
	if (fd < 0) return fd;
	long got = 0, done;
	while (got < n - 1 && (done = K(read, fd, to + got, n - 1 - got)) > 0) got += done;
	K(close, fd);
	to[got] = 0;
	return got;
}

/* State and parent of a process; its name (up to 15 bytes) into `name`. The name may hold anything. */
static char look(int pid, int *parent, char *name)
{
	char line[512];
	long n = slurp(pid, "stat", line, sizeof line);
	if (n <= 0) return 0;
	long open = 0, close = n;
	while (open < n && line[open] != '(') open++;
	while (close > open && line[close] != ')') close--;
	if (close + 4 >= n) return 0;
	if (name) { long m = close - open - 1; if (m > 15) m = 15; memcpy(name, line + open + 1, m); name[m] = 0; }
	*parent = number(line + close + 4);
	return line[close + 2];
}

static int list_processes(void)
{
	static u8 buffer[32768];
	long fd = K(openat, AT_CWD, "/proc", O_RDONLY | O_DIRECTORY), n;
	int count = 0;
	if (fd < 0) return 0;
	while ((n = K(getdents64, fd, buffer, sizeof buffer)) > 0)
		for (long at = 0; at < n; at += *(unsigned short *)(buffer + at + 16)) {
			const char *name = (char *)buffer + at + 19;
			if (*name >= '1' && *name <= '9' && count < MOST) pids[count++] = number(name);
		}
	K(close, fd);
	return count;
}

static int find_run(const char *token, long *child)
{
	char line[4096], name[16];
	int count = list_processes(), parent;
	for (int i = 0; i < count; i++) {
		long n = slurp(pids[i], "cmdline", line, sizeof line);
		const char *part = line + length(line) + 1;
		if (n <= 0 || part >= line + n || !same(part, "run")) continue;
		part += 4;
		if (part >= line + n || !same(part, token)) continue;
		if (!look(pids[i], &parent, name)) continue;
		*child = name[0] >= '1' && name[0] <= '9' ? number(name) : 0;
		if (*child > 1) return pids[i];
	}
	return 0;
}

static long send(const char *token, int which)
{
	long child;
	if (!find_run(token, &child)) return -ESRCH;
	if (K(kill, -child, which) < 0) K(kill, child, which);
	return 0;
}

/* Signal everything under `root`; how many of them still live. */
static int each_descendant(int root, int which)
{
	int count = list_processes(), living = 0, changed = 1, self = K(getpid);
	for (int i = 0; i < count; i++) {
		char state = look(pids[i], &parents[i], 0);
		if (!state || pids[i] == self) parents[i] = -1;
		dead[i] = !state || state == 'Z' || state == 'X'; /* its children may live */
		under[i] = 0;
	}
	while (changed) {
		changed = 0;
		for (int i = 0; i < count; i++) {
			if (under[i] || pids[i] == root || pids[i] == 1) continue;
			int is = parents[i] == root;
			for (int j = 0; !is && j < count; j++) is = under[j] && pids[j] == parents[i];
			if (is) under[i] = 1, changed = 1;
		}
	}
	for (int i = 0; i < count; i++)
		if (under[i] && !dead[i]) {
			living++;
			if (which) K(kill, pids[i], which);
		}
	return living;
}

static long end_tree(int root, long grace_ms)
{
	long start = now_ms();
	int parent;
	K(kill, root, SIGUSR1);
	if (grace_ms > 0) {
		each_descendant(root, SIGTERM);
		each_descendant(root, SIGCONT);
	}
	for (long pause = 2;; pause = pause < 50 ? pause * 2 : 50) {
		int over = now_ms() - start >= grace_ms;
		int living = each_descendant(root, over ? SIGKILL : 0);
		char state = look(root, &parent, 0);
		if (!living && (!state || state == 'Z' || state == 'X')) return 0;
		/* Nothing under it and it does not go: somebody stopped it. */
		if (!living && over && now_ms() - start > grace_ms + 1000) K(kill, root, SIGKILL);
		if (now_ms() - start > grace_ms + 30000) return -ETIMEDOUT;
		sleep_ms(pause);
	}
}

static long end(const char *token, long grace_ms)
{
	long child;
	int root = find_run(token, &child);
	return root ? end_tree(root, grace_ms) : -ESRCH;
}

/* -- files --------------------------------------------------------------------------------------- */

#define CHUNK (256 * 1024)
static u8 block[CHUNK + 8];

static __attribute__((noreturn)) void fail(long error)
{
	char out[32];
	put(put_number(put(out, "error "), -error), "\n");
	say(1, out);
	leave(0);
}

static __attribute__((noreturn)) void finish(long error)
{
	if (error < 0) fail(error);
	say(1, "ok\n");
	leave(0);
}

static int open_parent(char *path, char **name)
{
	/* The directory part is opened; `name` is what is left. */
	char *slash = 0;
	for (char *p = path; *p; p++) if (*p == '/') slash = p;
	*name = slash ? slash + 1 : path;
	if (!slash) return K(openat, AT_CWD, ".", O_RDONLY | O_DIRECTORY);
	if (slash == path) return K(openat, AT_CWD, "/", O_RDONLY | O_DIRECTORY);
	*slash = 0;
	long fd = K(openat, AT_CWD, path, O_PATH | O_DIRECTORY);
	*slash = '/';
	return fd;
}

static long make_dirs(char *path, int last_too)
{
	for (char *p = path + 1;; p++) {
		if (*p != '/' && *p) continue;
		char was = *p;
		if (!was && !last_too) return 0;
		*p = 0;
		long error = K(mkdirat, AT_CWD, path, 0777);
		*p = was;
		if (error == -EEXIST || error == -EROFS || error == -EACCES || error == -EPERM) {
			struct statx s;
			*p = 0;
			long known = K(statx, AT_CWD, path, 0, STATX_TYPE, &s);
			*p = was;
			if (known < 0) return known == -ENOENT ? error : known;
			if ((s.stx_mode & S_IFMT) != S_IFDIR) return was || error != -EEXIST ? -ENOTDIR : -EEXIST;
		} else if (error < 0) {
			return error;
		}
		if (!was) return 0;
	}
}

static void strip(char *path)
{
	u64 n = length(path);
	while (n > 1 && path[n - 1] == '/') path[--n] = 0;
}

static void read_file(char *path)
{
	struct statx s;
	long fd = K(openat, AT_CWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0) fail(fd == -ENXIO ? -EINVAL : fd);
	long error = K(statx, fd, "", AT_EMPTY_PATH, STATX_TYPE | STATX_SIZE | STATX_MODE, &s);
	if (error < 0) fail(error);
	if ((s.stx_mode & S_IFMT) == S_IFDIR) fail(-EISDIR);
	if ((s.stx_mode & S_IFMT) != S_IFREG) fail(-EINVAL);
	say(1, "ok\n");
	for (;;) {
		long n = K(read, fd, block + 4, CHUNK);
		if (n == -EINTR) continue;
		u32 head = n < 0 ? 0x80000000u | (u32)-n : (u32)n;
		memcpy(block, &head, 4);
		if (write_all(1, block, n > 0 ? n + 4 : 4)) leave(1);
		if (n <= 0) leave(0);
	}
}

static void write_file(char *given, const char *mode_text)
{
	static char path[4200], target[4200], temporary[300];
	struct statx s;
	char *name;
	if (length(given) >= 4096) fail(-ENAMETOOLONG);
	put(path, given);
	/* A link at the end is followed by hand: the new file takes the place of what it points to. */
	for (int hops = 0;; hops++) {
		if (K(statx, AT_CWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &s) < 0 || (s.stx_mode & S_IFMT) != S_IFLNK) break;
		if (hops == 40) fail(-ELOOP);
		long n = K(readlinkat, AT_CWD, path, target, 4096);
		if (n < 0) fail(n);
		target[n] = 0;
		if (target[0] == '/') { put(path, target); continue; }
		char *slash = path;
		for (char *p = path; *p; p++) if (*p == '/') slash = p + 1;
		if (slash - path + n >= 4096) fail(-ENAMETOOLONG);
		put(slash, target);
	}
	u64 n = length(path);
	if (!n || path[n - 1] == '/') fail(-EISDIR);
	long mode = *mode_text == '-' ? 0666 : number(mode_text), error;
	int keep = 0;
	u32 uid = 0, gid = 0;
	error = K(statx, AT_CWD, path, 0, STATX_BASIC_STATS, &s);
	if (error == 0) {
		if ((s.stx_mode & S_IFMT) == S_IFDIR) fail(-EISDIR);
		if ((s.stx_mode & S_IFMT) != S_IFREG) fail(-EINVAL);
		keep = 1; uid = s.stx_uid; gid = s.stx_gid;
		if (*mode_text == '-') mode = s.stx_mode & 07777;
		long writable = K(openat, AT_CWD, path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
		if (writable < 0 && writable != -ETXTBSY) fail(writable);
		K(close, writable);
	} else if (error != -ENOENT) {
		fail(error);
	}
	error = make_dirs(path, 0);
	if (error < 0) fail(error);
	long directory = open_parent(path, &name);
	if (directory < 0) fail(directory);
	u64 salt = 0;
	K(getrandom, &salt, 8, 0);
	put(put_number(put(temporary, ".lowtide-"), (long)(salt >> 1)), ".part");
	long fd = K(openat, directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, *mode_text == '-' && !keep ? 0666 : 0600);
	if (fd < 0) fail(fd);
	say(1, "ok\n");
	long total = 0;
	for (;;) {
		u32 head;
		if (read_all(0, &head, 4)) { error = -EPIPE; break; }
		if (!head) break;
		if (head > CHUNK) { error = -EPROTO; break; }
		if (read_all(0, block, head)) { error = -EPIPE; break; }
		u32 at = 0;
		while (at < head) {
			long done = K(write, fd, block + at, head - at);
			if (done == -EINTR) continue;
			if (done < 0) { error = done; break; }
			at += done; total += done;
		}
		if (error < 0) break;
	}
	if (error == -ENOENT) error = 0; /* what the look at the old file said */
	if (error == 0) {
		if (keep) K(fchown, fd, uid, gid);
		if (keep || *mode_text != '-') error = K(fchmod, fd, mode);
	}
	if (error == 0) error = K(renameat2, directory, temporary, directory, name, 0);
	if (error < 0) { K(unlinkat, directory, temporary, 0); fail(error); }
	char out[40];
	put(put_number(put(out, "done "), total), "\n");
	say(1, out);
	leave(0);
}

static long describe(int at, const char *path, const char *name)
{
	/* kind size mode mtime NUL name NUL target NUL */
	static char line[9000];
	struct statx s;
	long error = K(statx, at, path, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, &s);
	if (error < 0) return error;
	u32 type = s.stx_mode & S_IFMT;
	char *p = put(line, type == S_IFREG ? "f " : type == S_IFDIR ? "d " : type == S_IFLNK ? "l " : "o ");
	p = put(put_number(p, s.stx_size), " ");
	p = put(put_number(p, s.stx_mode & 07777), " ");
	p = put_number(p, s.stx_mtime.tv_sec) + 1;
	p = put(p, name) + 1;
	if (type == S_IFLNK) {
		long n = K(readlinkat, at, path, p, 4096);
		if (n > 0) p += n;
	}
	*p++ = 0;
	return write_all(1, line, p - line);
}

static void list(const char *path)
{
	static u8 buffer[32768];
	long fd = K(openat, AT_CWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), n;
	if (fd < 0) fail(fd);
	say(1, "ok\n");
	while ((n = K(getdents64, fd, buffer, sizeof buffer)) > 0)
		for (long at = 0; at < n; at += *(unsigned short *)(buffer + at + 16)) {
			const char *name = (char *)buffer + at + 19;
			if (!same(name, ".") && !same(name, "..")) describe(fd, name, name);
		}
	write_all(1, "", 1); /* an empty record says that this was all */
	leave(0);
}

static long remove_under(int at, const char *name, int depth)
{
	u8 buffer[4096];
	long n, error = K(unlinkat, at, name, 0);
	if (error != -EISDIR && error != -EPERM) return error;
	if (depth > 2000) return -ELOOP;
	long fd = K(openat, at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd == -ENOTDIR) return error;
	if (fd == -EACCES) { K(fchmodat, at, name, 0700); fd = K(openat, at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }
	if (fd < 0) return fd;
	for (int again = 1; again;) {
		again = 0;
		K(lseek, fd, 0, 0);
		while ((n = K(getdents64, fd, buffer, sizeof buffer)) > 0)
			for (long p = 0; p < n; p += *(unsigned short *)(buffer + p + 16)) {
				const char *child = (char *)buffer + p + 19;
				if (same(child, ".") || same(child, "..")) continue;
				error = remove_under(fd, child, depth + 1);
				if (error < 0 && error != -ENOENT) { K(close, fd); return error; }
				again = 1;
			}
	}
	K(close, fd);
	return K(unlinkat, at, name, AT_REMOVEDIR);
}

static void remove_path(char *path, int recursive)
{
	struct statx s;
	strip(path);
	long error = K(statx, AT_CWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &s);
	if (error < 0) fail(error);
	if ((s.stx_mode & S_IFMT) != S_IFDIR) error = K(unlinkat, AT_CWD, path, 0);
	else if (recursive) error = remove_under(AT_CWD, path, 0);
	else error = K(unlinkat, AT_CWD, path, AT_REMOVEDIR);
	finish(error);
}

/* -- connect: a TCP port of the container -------------------------------------------------------- */

static void pass_on(int port)
{
	struct sockaddr_in four = {.sin_family = 2, .sin_port = __builtin_bswap16(port), .sin_addr.s_addr = __builtin_bswap32(0x7f000001)};
	struct sockaddr_in6 six = {.sin6_family = 10, .sin6_port = __builtin_bswap16(port)};
	six.sin6_addr.in6_u.u6_addr8[15] = 1;
	long fd = K(socket, 2, 1, 0), error = fd < 0 ? fd : K(connect, fd, &four, sizeof four);
	if (error < 0) {
		if (fd >= 0) K(close, fd);
		fd = K(socket, 10, 1, 0);
		if (fd < 0 || K(connect, fd, &six, sizeof six) < 0) fail(error);
	}
	say(1, "ok\n");
	int in = 1, out = 1;
	while (out) {
		struct pollfd w[2] = {{.fd = in ? 0 : -1, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
		if (K(ppoll, w, 2, 0, 0, 0) < 0) continue;
		if (w[0].revents) {
			long n = K(read, 0, block, CHUNK);
			if (n <= 0 || write_all(fd, block, n)) { in = 0; K(shutdown, fd, 1); }
		}
		if (w[1].revents) {
			long n = K(read, fd, block, CHUNK);
			if (n <= 0 || write_all(1, block, n)) out = 0;
		}
	}
	leave(0);
}

/* -- serve: commands over one pair of streams ------------------------------------------------------ */

/* A frame either way: length of what follows (4 bytes), kind (1), which command (4), then the rest. */
enum { START = 1, INPUT, INPUT_END, SIGNAL, END, CREDIT };                       /* to us */
enum { STDOUT = 1, STDERR, EXITED, STARTED, INPUT_BROKEN, INPUT_TAKEN, REFUSED }; /* from us */

#define COMMANDS 1024
#define WINDOW (256 * 1024) /* how much standard input may wait here for one command */
#define FRAME (4 * 1024 * 1024)
#define PIECE 65536

static struct command {
	u32 id;
	int used, pid, in, out, err, exited, code, input_over;
	long credit; /* how much output the other side will take */
	u8 *input;
	u32 from, to;
} commands[COMMANDS];
static int deaf; /* nobody reads what we say any more */
static u8 *incoming;
static u8 outgoing[PIECE + 16];

static void frame(u8 kind, u32 id, const void *data, u32 n)
{
	u32 all = n + 5;
	if (deaf) return;
	memcpy(outgoing, &all, 4);
	outgoing[4] = kind;
	memcpy(outgoing + 5, &id, 4);
	if (n && data != outgoing + 9) memcpy(outgoing + 9, data, n);
	deaf = write_all(1, outgoing, n + 9) < 0;
}
static void frame_number(u8 kind, u32 id, u32 value) { frame(kind, id, &value, 4); }

static void *pages(u64 n)
{
	long at = K(mmap, 0, n, 3, 0x22, -1, 0); /* read and write, private, anonymous */
	return at < 0 && at > -4096 ? 0 : (void *)at;
}
static void shut(int *fd) { if (*fd >= 0) K(close, *fd); *fd = -1; }

static struct command *find_command(u32 id)
{
	for (int i = 0; i < COMMANDS; i++) if (commands[i].used && commands[i].id == id) return &commands[i];
	return 0;
}

static __attribute__((noreturn)) void start_inside(u8 *data, u32 n, int in, int out, int err)
{
	/* flags, argc, number of variables; then working directory, arguments and variables, each with its NUL */
	static char *argv[65536], *variables[16384];
	unsigned short argc, count;
	memcpy(&argc, data + 1, 2);
	memcpy(&count, data + 3, 2);
	char *p = (char *)data + 5, *end = (char *)data + n, *cwd = p;
	u32 have = 0;
	p += length(p) + 1;
	for (u32 i = 0; i < argc && p < end; i++) { argv[i] = p; p += length(p) + 1; }
	argv[argc] = 0;
	if (count > 8192) count = 8192;
	for (u32 i = 0; i < count && p < end; i++) { variables[have++] = p; p += length(p) + 1; }
	for (char **e = environment; *e && have < 16000; e++) {
		int taken = 0;
		for (u32 i = 0; i < count && !taken; i++) {
			const char *a = *e, *b = variables[i];
			while (*a && *a == *b && *a != '=') a++, b++;
			taken = *a == '=' && *b == '=';
		}
		if (!taken) variables[have++] = *e;
	}
	variables[have] = 0;
	environment = variables;
	K(dup3, in, 0, 0); K(dup3, out, 1, 0); K(dup3, err, 2, 0);
	K(prctl, PR_SET_CHILD_SUBREAPER, 1);
	long child = K(clone, SIGCHLD);
	if (child == 0) { K(setsid); become(cwd, argv); }
	if (child < 0) { say(2, "lowtide: no more processes can be started here\n"); leave(126); }
	K(close_range, 0, ~0U, 0);
	for (int fd = 0; fd < 1024; fd++) K(close, fd); /* kernels without close_range */
	leave(supervise(child));
}

static void start(u32 id, u8 *data, u32 n)
{
	struct command *c = 0;
	for (int i = 0; i < COMMANDS && !c; i++) if (!commands[i].used) c = &commands[i];
	int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
	if (!c || n < 8 || data[n - 1]) { frame_number(REFUSED, id, EAGAIN); return; }
	int wants_input = data[0] & 1;
	long error = wants_input ? K(pipe2, in, O_CLOEXEC) : (in[0] = K(openat, AT_CWD, "/dev/null", O_RDONLY | O_CLOEXEC)) < 0 ? in[0] : 0;
	if (error >= 0) error = K(pipe2, out, O_CLOEXEC);
	if (error >= 0) error = K(pipe2, err, O_CLOEXEC);
	if (error >= 0 && wants_input && !c->input && !(c->input = pages(WINDOW))) error = -ENOMEM;
	long pid = error < 0 ? error : K(clone, SIGCHLD);
	if (pid == 0) start_inside(data, n, in[0], out[1], err[1]);
	shut(&in[0]); shut(&out[1]); shut(&err[1]);
	if (pid < 0) {
		shut(&in[1]); shut(&out[0]); shut(&err[0]);
		frame_number(REFUSED, id, -pid);
		return;
	}
	if (in[1] >= 0) K(fcntl, in[1], F_SETFL, O_WRONLY | O_NONBLOCK);
	K(fcntl, out[0], F_SETFL, O_RDONLY | O_NONBLOCK);
	K(fcntl, err[0], F_SETFL, O_RDONLY | O_NONBLOCK);
	c->used = 1; c->id = id; c->pid = pid; c->in = in[1]; c->out = out[0]; c->err = err[0];
	c->exited = c->code = c->input_over = 0; c->from = c->to = 0; c->credit = 1024 * 1024;
	frame_number(STARTED, id, pid);
}

static void feed(struct command *c)
{
	while (c->in >= 0 && c->from < c->to) {
		long done = K(write, c->in, c->input + c->from, c->to - c->from);
		if (done == -EAGAIN) return;
		if (done < 0) { shut(&c->in); frame(INPUT_BROKEN, c->id, 0, 0); return; }
		c->from += done;
		frame_number(INPUT_TAKEN, c->id, done);
	}
	c->from = c->to = 0;
	if (c->input_over) shut(&c->in);
}

/* Pass output on as far as the credit goes. True when nothing is left to read for now. */
static int drain(struct command *c, int *fd, u8 kind)
{
	for (int rounds = 0; *fd >= 0; rounds++) {
		if (deaf) c->credit = PIECE; /* the command goes on, its output goes nowhere */
		long most = c->credit < PIECE ? c->credit : PIECE;
		if (most <= 0 || (rounds == 8 && !c->exited)) return 0;
		long n = K(read, *fd, outgoing + 9, most);
		if (n == -EINTR) continue;
		if (n == -EAGAIN) return 1;
		if (n <= 0) { shut(fd); return 1; }
		c->credit -= n;
		frame(kind, c->id, outgoing + 9, n);
	}
	return 1;
}

static void settle(struct command *c)
{
	/* What the command wrote has been read: it is over, even if a background job holds the pipes. */
	if (drain(c, &c->out, STDOUT) & drain(c, &c->err, STDERR)) {
		shut(&c->in); shut(&c->out); shut(&c->err);
		frame_number(EXITED, c->id, c->code);
		c->used = 0;
	}
}

static void take(u8 *data, u32 n)
{
	u32 id, value = 0;
	u8 kind = data[0];
	memcpy(&id, data + 1, 4);
	data += 5; n -= 5;
	if (kind == START) { start(id, data, n); return; }
	struct command *c = find_command(id);
	if (!c) return;
	if (n >= 4) memcpy(&value, data, 4);
	if (kind == CREDIT) {
		c->credit += value;
		if (c->exited) settle(c);
	} else if (kind == INPUT && c->in >= 0) {
		if (c->from && c->to + n > WINDOW) { memcpy(c->input, c->input + c->from, c->to - c->from); c->to -= c->from; c->from = 0; }
		if (c->to + n > WINDOW) { shut(&c->in); frame(INPUT_BROKEN, id, 0, 0); return; } /* more than agreed */
		memcpy(c->input + c->to, data, n);
		c->to += n;
		feed(c);
	} else if (kind == INPUT_END) {
		c->input_over = 1;
		feed(c);
	} else if (kind == SIGNAL && !c->exited) {
		char name[16]; int parent;
		/* Not yet named: it is only just starting. */
		for (int i = 0; i < 200 && look(c->pid, &parent, name) && !(name[0] >= '1' && name[0] <= '9'); i++) sleep_ms(1);
		long child = number(name);
		if (child > 1 && K(kill, -child, value) < 0) K(kill, child, value);
	} else if (kind == END && !c->exited) {
		if (K(clone, SIGCHLD) == 0) { end_tree(c->pid, value); leave(0); }
	}
}

static void serve(void)
{
	static struct pollfd w[2 + 3 * COMMANDS];
	u32 filled = 0;
	int ending = 0, over = 0;
	u64 wanted = (1UL << (SIGCHLD - 1)) | (1UL << (SIGTERM - 1));
	K(prctl, PR_SET_DUMPABLE, 0);
	block_signals(1);
	incoming = pages(FRAME + 16);
	long signals = K(signalfd4, -1, &wanted, 8, O_CLOEXEC | O_NONBLOCK);
	if (!incoming || signals < 0) leave(1);
	K(fcntl, 0, F_SETFD, 1);
	say(1, "ok\n");
	for (;;) {
		int n = 2, busy = 0;
		w[0] = (struct pollfd){.fd = signals, .events = POLLIN};
		w[1] = (struct pollfd){.fd = over ? -1 : 0, .events = POLLIN};
		for (int i = 0; i < COMMANDS; i++) {
			struct command *c = &commands[i];
			if (!c->used) continue;
			busy = 1;
			w[n++] = (struct pollfd){.fd = c->in >= 0 && c->from < c->to ? c->in : -1, .events = POLLOUT};
			w[n++] = (struct pollfd){.fd = c->credit > 0 ? c->out : -1, .events = POLLIN};
			w[n++] = (struct pollfd){.fd = c->credit > 0 ? c->err : -1, .events = POLLIN};
		}
		if ((ending || over || deaf) && !busy) leave(0);
		K(ppoll, w, n, 0, 0, 0);
		int at = 2;
		for (int i = 0; i < COMMANDS; i++) {
			struct command *c = &commands[i];
			if (!c->used) continue;
			if (w[at].revents) feed(c);
			if (w[at + 1].revents) drain(c, &c->out, STDOUT);
			if (w[at + 2].revents) drain(c, &c->err, STDERR);
			at += 3;
		}
		u8 info[128];
		while (K(read, signals, info, sizeof info) == sizeof info) if (*(u32 *)info == SIGTERM) ending = 1;
		int status; long pid;
		while ((pid = K(wait4, -1, &status, WNOHANG, 0)) > 0)
			for (int i = 0; i < COMMANDS; i++)
				if (commands[i].used && commands[i].pid == pid) { commands[i].exited = 1; commands[i].code = exit_code(status); settle(&commands[i]); }
		if (w[1].revents) {
			long got = K(read, 0, incoming + filled, FRAME - filled);
			if (got == -EINTR || got == -EAGAIN) continue;
			if (got <= 0) {
				over = deaf = 1;
				for (int i = 0; i < COMMANDS; i++) {
					if (!commands[i].used) continue;
					shut(&commands[i].in);
					commands[i].credit = PIECE;
					if (commands[i].exited) settle(&commands[i]);
				}
				continue;
			}
			filled += got;
			u32 from = 0;
			while (filled - from >= 4) {
				u32 size;
				memcpy(&size, incoming + from, 4);
				if (size < 5 || size > FRAME - 4) leave(1);
				if (filled - from - 4 < size) break;
				take(incoming + from + 4, size);
				from += 4 + size;
			}
			memcpy(incoming, incoming + from, filled - from);
			filled -= from;
		}
	}
}

__attribute__((used)) void begin(long *stack)
{
	int argc = (int)stack[0];
	char **argv = (char **)(stack + 1);
	environment = argv + argc + 1;
	const char *what = argc > 1 ? argv[1] : "";
	if (same(what, "serve")) serve();
	if (argc > 2) {
		if (same(what, "init")) init(argc - 2, argv + 2);
		if (same(what, "run") && argc > 5) run(argv + 2);
		u64 pipe = 1UL << (SIGPIPE - 1);
		K(rt_sigprocmask, SIG_BLOCK, &pipe, 0, 8);
		if (same(what, "signal") && argc > 3) finish(send(argv[2], number(argv[3])));
		if (same(what, "end") && argc > 3) finish(end(argv[2], number(argv[3])));
		if (same(what, "read")) read_file(argv[2]);
		if (same(what, "write") && argc > 3) write_file(argv[2], argv[3]);
		if (same(what, "list")) list(argv[2]);
		if (same(what, "stat")) {
			struct statx s;
			strip(argv[2]);
			long error = K(statx, AT_CWD, argv[2], AT_SYMLINK_NOFOLLOW, STATX_TYPE, &s);
			if (error < 0) fail(error);
			say(1, "ok\n");
			describe(AT_CWD, argv[2], argv[2]);
			leave(0);
		}
		if (same(what, "mkdir")) {
			strip(argv[2]);
			finish(make_dirs(argv[2], 1));
		}
		if (same(what, "remove") && argc > 3) remove_path(argv[2], argv[3][0] == 'r');
		if (same(what, "connect")) pass_on(number(argv[2]));
	}
	say(2, "lowtide: not meant to be run by hand\n");
	leave(2);
}
