/* The one program lowtide brings into a container: PID 1, the parent of each command, and file calls.
 *
 * It is freestanding (no libc, a few kilobytes, static), so that it runs in any Linux image, also one
 * without a shell, and it is mounted read-only. Built by `build.py` beside it.
 *
 *   init SECONDS [COMMAND...]        PID 1: reaps, passes signals on, and ends everything at the deadline
 *   run TOKEN -|tROWSxCOLUMNS CWD COMMAND...   the parent of one command: says its exit code in-band, adopts its orphans
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
		block_signals(0);
		if (argv[2][0] && K(chdir, argv[2]) < 0) {
			say(2, "lowtide: cannot enter the working directory "); say(2, argv[2]); say(2, "\n");
			leave(126);
		}
		execute(argv + 3);
	}
	if (child < 0) { say(2, "lowtide: no more processes can be started here\n"); leave(126); }
	char name[16];
	put_number(name, child);
	K(prctl, PR_SET_NAME, name); /* `signal` and `end` read it from our stat line */
	K(close, 0);
	int code = -1, status;
	for (;;) {
		long pid = K(wait4, -1, &status, 0, 0);
		if (pid == child) code = exit_code(status);
		if (pid == -ECHILD) break;
		if (code >= 0) {
			/* `end` asks with SIGUSR1 to stay until every orphan is gone, or they would escape to PID 1. */
			u64 pending = 0;
			K(rt_sigpending, &pending, 8);
			if (!(pending & (1UL << (SIGUSR1 - 1)))) break;
		}
	}
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

static long end(const char *token, long grace_ms)
{
	long child, start = now_ms();
	int parent, root = find_run(token, &child);
	if (!root) return -ESRCH;
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

__attribute__((used)) void begin(long *stack)
{
	int argc = (int)stack[0];
	char **argv = (char **)(stack + 1);
	environment = argv + argc + 1;
	const char *what = argc > 1 ? argv[1] : "";
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
