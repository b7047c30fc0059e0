/* The one program lowtide brings into every sandbox that is not local.
 *
 * It is freestanding (no libc, a few kilobytes, static), so that it runs in any Linux image, also one
 * without a shell. Built by `build.py` beside it; its frames and bounds are in docs/inside.md.
 *
 *   init SECONDS CAP [COMMAND...]   the sandbox's main process: the server, and the lease's clock
 *   guard SECONDS CAP [COMMAND...]  the same where `attach` runs as the sandbox's own user
 *   guard log SECONDS CAP [COMMAND...]   the same, and keeps what the command prints, where nobody outside does
 *   attach [text] [wait]            hands its standard input and output to the server of `init`, waiting until it serves
 *   serve NAME [text] [once] [own]  the same without `init`: starts the server NAME unless it runs; begins with
 *                                   what LOWTIDE_FIRST (base64) holds
 *
 * `once`: what there is to say is on standard input, to its end; the channel ends when that is answered, or
 * after ONCE_MS. `own`: the program's file is nobody else's, and goes as soon as it runs.
 *
 * Everything in the sandbox may be hostile, with the same user id. So nothing that holds a channel or a
 * result is ever dumpable (no ptrace, no /proc/PID/fd): the server is so before anything else runs, its
 * children are forks of it that never execute, and `attach` is a file that may be executed and not read,
 * or (guard), for a root that may read everything, has a capability that no command has.
 * A channel is taken only with the key, which is in no argument list and in no command's environment.
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
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

#define AT_CWD (-100)
#define CLOCK_BOOT 7 /* goes on while the machine sleeps */
#define EXPIRED 124

/* -- the kernel ---------------------------------------------------------------------------------- */

#if defined(HOSTED) /* for the sanitizers, which need a C library */
long syscall(long, ...);
int *__errno_location(void);
static long sys(long n, long a, long b, long c, long d, long e, long f)
{
	long r = syscall(n, a, b, c, d, e, f);
	return r == -1 ? -*__errno_location() : r;
}
void *memcpy(void *, const void *, u64);
void *memmove(void *, const void *, u64);
void *memset(void *, int, u64);
#elif defined(__x86_64__)
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

#if !defined(HOSTED)
void *memset(void *to, int value, u64 n) { u8 *p = to; while (n--) *p++ = value; return to; }
void *memcpy(void *to, const void *from, u64 n)
{
#if defined(__x86_64__)
	void *p = to;
	__asm__ volatile("rep movsb" : "+D"(p), "+S"(from), "+c"(n) : : "memory");
#else
	u8 *p = to; const u8 *q = from;
	for (; n >= 8; n -= 8, p += 8, q += 8) __builtin_memcpy(p, q, 8);
	while (n--) *p++ = *q++;
#endif
	return to;
}
void *memmove(void *to, const void *from, u64 n) /* only ever towards the front */
{
	u8 *p = to; const u8 *q = from;
	while (n--) *p++ = *q++;
	return to;
}
#endif

static u64 length(const char *s) { u64 n = 0; while (s[n]) n++; return n; }
static int same(const char *a, const char *b) { while (*a && *a == *b) a++, b++; return *a == *b; }
static int begins(const char *a, const char *with) { while (*with && *a == *with) a++, with++; return !*with; }
static int digit(char c) { return c >= '0' && c <= '9'; }
static long number(const char *s) { long n = 0; while (digit(*s) && n < 1L << 50) n = n * 10 + (*s++ - '0'); return n; }
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
/* Where a command may have filled a pipe that nobody reads: the clock waits for nobody. */
static void say_if_heard(int fd, const char *s)
{
	struct pollfd one = {.fd = fd, .events = POLLOUT};
	struct { long sec, nsec; } none = {0, 0};
	if (K(ppoll, &one, 1, &none, 0, 0) > 0) K(write, fd, s, length(s));
}
static int copy(int fd) { return K(fcntl, fd, F_DUPFD_CLOEXEC, 3); }
static void close_from(int first)
{
	if (K(close_range, first, ~0U, 0) >= 0) return;
	/* An old kernel, or gVisor's: asked which are open, because a call for each number takes gVisor a third of a second. */
	static struct pollfd w[256];
	struct { long sec, nsec; } none = {0, 0};
	for (int at = first; at < 16384; at += 256) {
		for (int i = 0; i < 256; i++) w[i] = (struct pollfd){.fd = at + i};
		int told = K(ppoll, w, 256, &none, 0, 0) >= 0;
		for (int i = 0; i < 256; i++) if (!told || !(w[i].revents & POLLNVAL)) K(close, at + i);
	}
}
static void shut(int *fd) { if (*fd >= 0) K(close, *fd); *fd = -1; }
static void *pages(u64 n)
{
	long at = K(mmap, 0, n, 3, 0x22, -1, 0); /* read and write, private, anonymous */
	return at < 0 && at > -4096 ? 0 : (void *)at;
}
static long now_ms(void)
{
	struct { long sec, nsec; } t;
	K(clock_gettime, CLOCK_BOOT, &t);
	return t.sec * 1000 + t.nsec / 1000000;
}
static void block_signals(int yes)
{
	u64 mask = yes ? ~0UL : 0;
	K(rt_sigprocmask, SIG_SETMASK, &mask, 0, 8);
}
static int exit_code(int status) { return (status & 0x7f) ? 128 + (status & 0x7f) : (status >> 8) & 0xff; }

/* -- becoming a command ---------------------------------------------------------------------------- */

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

/* A whole small file that the sandbox may have put anything into; its text, or 0. */
static char *slurp(const char *path, u32 most)
{
	struct statx s;
	long fd = K(openat, AT_CWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), got = 0, n;
	if (fd < 0) return 0;
	char *text = 0;
	if (K(statx, fd, "", AT_EMPTY_PATH, STATX_TYPE, &s) == 0 && (s.stx_mode & S_IFMT) == S_IFREG && (text = pages(most + 1)))
		while (got < most && (n = K(read, fd, text + got, most - got)) > 0) got += n;
	K(close, fd);
	return text;
}

/* The field after `count` colons of a line, which ends at a colon or the line's end. */
static const char *field(const char *line, int count)
{
	while (count && *line && *line != '\n') if (*line++ == ':') count--;
	return count ? "" : line;
}
static int is_word(const char *at, const char *word, u64 n)
{
	for (u64 i = 0; i < n; i++) if (at[i] != word[i]) return 0;
	return at[n] == ':' || at[n] == ',' || at[n] == '\n' || !at[n];
}
static const char *next_line(const char *p) { while (*p && *p != '\n') p++; return *p ? p + 1 : p; }

#define UNKNOWN_USER 1000 /* beside the error numbers */
#define NOBODY 0xffffffffL /* no user's number: the kernel would leave us who we are */
static char home[4200];

/* Become NAME, UID, NAME:GROUP or UID:GID. 0, or what stands against it. */
static int become_user(const char *user, int terminal)
{
	long uid = 0, gid = 0;
	u32 groups[64];
	int known = 0, count = 0;
	u64 n = 0;
	while (user[n] && user[n] != ':') n++;
	const char *group = user[n] ? user + n + 1 : 0, *name = 0, *text = slurp("/etc/passwd", 1 << 20);
	int numeric = n > 0;
	for (u64 i = 0; i < n; i++) numeric &= digit(user[i]);
	for (const char *p = text ? text : ""; *p && !known; p = next_line(p))
		if (is_word(p, user, n) || (numeric && is_word(field(p, 2), user, n))) {
			name = p; known = 1;
			uid = number(field(p, 2)); gid = number(field(p, 3));
			const char *from = field(p, 5);
			put(home, "HOME=");
			u64 i = 0;
			while (from[i] && from[i] != ':' && from[i] != '\n' && i < 4096) home[5 + i] = from[i], i++;
		}
	if (!known && !numeric) return UNKNOWN_USER;
	if (!known) uid = number(user);
	text = slurp("/etc/group", 1 << 20);
	if (group) {
		u64 g = length(group);
		int found = g > 0;
		for (u64 i = 0; i < g; i++) found &= digit(group[i]);
		if (found) gid = number(group);
		for (const char *p = text ? text : ""; *p && !found; p = next_line(p))
			if (is_word(p, group, g)) gid = number(field(p, 2)), found = 1;
		if (!found) return UNKNOWN_USER;
	} else if (name && text) {
		u64 length_of_name = 0;
		while (name[length_of_name] != ':') length_of_name++;
		for (const char *p = text; *p; p = next_line(p))
			for (const char *member = field(p, 3); *member && *member != '\n' && count < 64; member++)
				if ((member[-1] == ':' || member[-1] == ',') && is_word(member, name, length_of_name)) { groups[count++] = number(field(p, 2)); break; }
	}
	if (uid >= NOBODY || gid >= NOBODY) return UNKNOWN_USER;
	if (K(getuid) == uid && K(getgid) == gid && uid) return 0;
	if (terminal) K(fchown, 0, uid, -1);
	long error = K(setgroups, count, groups);
	if (error >= 0) error = K(setresgid, gid, gid, gid);
	if (error >= 0) error = K(setresuid, uid, uid, uid);
	return error < 0 ? -error : 0;
}

/* -- processes, as /proc shows them ---------------------------------------------------------------- */

#define MOST 32768
static int pids[MOST], parents[MOST];
static u8 states[MOST], under[MOST];

/* State and parent of a process. Its name may hold anything. */
static char look(int pid, int *parent)
{
	char path[64], line[512];
	put(put_number(put(path, "/proc/"), pid), "/stat");
	long fd = K(openat, AT_CWD, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) return 0;
	long n = K(read, fd, line, sizeof line - 1);
	K(close, fd);
	if (n <= 0) return 0;
	line[n] = 0;
	long close = n;
	while (close > 0 && line[close] != ')') close--;
	if (close == 0 || close + 4 >= n) return 0;
	*parent = number(line + close + 4);
	const char *threads = line + close + 2;
	for (int i = 0; i < 17 && *threads; threads++) i += *threads == ' ';
	/* One whose first thread has left is shown as a zombie while its others run on. */
	return line[close + 2] == 'Z' && number(threads) > 1 ? 'R' : line[close + 2];
}

static int list_processes(void)
{
	static u8 buffer[32768];
	long fd = K(openat, AT_CWD, "/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC), n;
	int count = 0;
	if (fd < 0) return 0;
	while ((n = K(getdents64, fd, buffer, sizeof buffer)) > 0)
		for (long at = 0; at < n; at += *(u16 *)(buffer + at + 16)) {
			const char *name = (char *)buffer + at + 19;
			if (*name >= '1' && *name <= '9' && count < MOST) pids[count++] = number(name);
		}
	K(close, fd);
	return count;
}

static int place_of(int pid, int count) /* /proc lists in ascending order */
{
	int from = 0, to = count;
	while (from < to) { int middle = (from + to) / 2; if (pids[middle] < pid) from = middle + 1; else to = middle; }
	return from < count && pids[from] == pid ? from : -1;
}

#define KEEPERS 8192
static int keepers[KEEPERS], keeper_count; /* our own children: each command's keeper, and file calls */

static int is_keeper(int pid) { for (int i = 0; i < keeper_count; i++) if (keepers[i] == pid) return 1; return 0; }
static int forget_keeper(int pid)
{
	for (int i = 0; i < keeper_count; i++) if (keepers[i] == pid) { keepers[i] = keepers[--keeper_count]; return 1; }
	return 0;
}

/* Where no process can be told to take orphans (gVisor before 2023), they fall to us. Then every process of a command has
 * its number in a limit that no kernel looks at, and that what it starts inherits. */
#define RLIMIT_RSS 5
static int orphans_are_ours;
static u64 last_mark;

static int has_mark(int pid, u64 mark)
{
	u64 limit[2] = {0, 0};
	return K(prlimit64, pid, RLIMIT_RSS, 0, limit) == 0 && limit[0] == mark;
}

/* Everything under `root` or with this mark, or (0) everything of ours that is under no keeper: how many of it live.
 * With `first`, each gets that signal, and then each gets `second`: what is stopped forks no more while
 * the others are killed, so that a fork bomb cannot outrun this. */
static int each_under(int root, u64 mark, int first, int second)
{
	int count = list_processes(), living = 0, changed = 1, self = K(getpid);
	for (int i = 0; i < count; i++) {
		states[i] = look(pids[i], &parents[i]);
		if (!states[i]) parents[i] = -1;
		int orphan = parents[i] == self && !is_keeper(pids[i]);
		under[i] = pids[i] != self && states[i] && (root ? parents[i] == root || (orphan && mark && has_mark(pids[i], mark)) : orphan);
	}
	while (changed) {
		changed = 0;
		for (int i = 0; i < count; i++) {
			if (under[i] || parents[i] <= 1 || pids[i] == root || pids[i] == self) continue;
			int parent = place_of(parents[i], count);
			if (parent >= 0 && under[parent]) under[i] = 1, changed = 1;
		}
	}
	for (int i = 0; i < count; i++) {
		if (!under[i] || states[i] == 'Z' || states[i] == 'X') { under[i] = 0; continue; }
		living++;
		if (first) K(kill, pids[i], first);
	}
	for (int i = 0; second && i < count; i++) if (under[i]) K(kill, pids[i], second);
	return living;
}

/* -- files: each call is a fork of the server, with its own pair of pipes ---------------------------- */

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
static __attribute__((noreturn)) void done(long total)
{
	char out[40];
	put(put_number(put(out, "done "), total), "\n");
	say(1, out);
	leave(0);
}

/* Data of any size travels in pieces with a length before each: 0 ends it, the top bit is an error. */
static u32 piece_left;
static void pass(const void *data, u32 n)
{
	u32 most = CHUNK;
	for (const u8 *p = data; n;) {
		u32 now = n < most ? n : most;
		if (write_all(1, &now, 4) || write_all(1, p, now)) leave(1);
		p += now; n -= now;
	}
}
static __attribute__((noreturn)) void pass_end(long error)
{
	u32 head = error < 0 ? 0x80000000u | (u32)-error : 0;
	write_all(1, &head, 4);
	leave(0);
}
/* The same, with what it is about: of a tree, the name from its top on. */
static __attribute__((noreturn)) void pass_error(long error, const char *name)
{
	u32 head = 0x80000000u | (u32)-error;
	if (!write_all(1, &head, 4)) write_all(1, name, length(name));
	leave(0);
}
/* Up to n bytes of what comes: how many, 0 at the end, or an error. */
static long fetch(void *to, u32 n)
{
	if (!piece_left) {
		if (read_all(0, &piece_left, 4)) return -EPIPE;
		if (!piece_left) return 0;
		if (piece_left > CHUNK) return -EPROTO;
	}
	if (n > piece_left) n = piece_left;
	if (read_all(0, to, n)) return -EPIPE;
	piece_left -= n;
	return n;
}
static long write_file_all(int fd, const u8 *p, u32 n)
{
	while (n) {
		long wrote = K(write, fd, p, n);
		if (wrote == -EINTR) continue;
		if (wrote < 0) return wrote;
		p += wrote; n -= wrote;
	}
	return 0;
}

/* A path that is longer than the kernel takes is walked down: a directory, and what is left from there. */
static int walk_down(char **path)
{
	long at = AT_CWD;
	while (length(*path) >= 4000) {
		char *cut = *path + 3000;
		while (cut > *path && *cut != '/') cut--;
		if (cut == *path) break;
		*cut = 0;
		long below = K(openat, at, *path, O_PATH | O_DIRECTORY | O_CLOEXEC);
		*cut = '/';
		if (at != AT_CWD) K(close, at);
		if (below < 0) return below;
		at = below;
		for (*path = cut; **path == '/'; ++*path) {}
	}
	return at;
}
static void close_at(int at) { if (at >= 0) K(close, at); }

static int open_parent(int at, char *path, char **name)
{
	/* The directory part is opened; `name` is what is left. */
	char *slash = 0;
	for (char *p = path; *p; p++) if (*p == '/') slash = p;
	*name = slash ? slash + 1 : path;
	if (!slash) return K(openat, at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (slash == path) return K(openat, at, "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	*slash = 0;
	long fd = K(openat, at, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	*slash = '/';
	return fd;
}

static long make_dirs(char *path, int last_too)
{
	char *base = path; /* what is before it is open at `at` */
	long error = -ENOENT, at = AT_CWD;
	for (char *p = path + 1; path[0]; p++) {
		if ((*p != '/' && *p) || p < base) continue;
		char was = *p;
		if (!was && !last_too) { error = 0; break; }
		*p = 0;
		error = K(mkdirat, at, base, 0777);
		if (error == -EEXIST || error == -EROFS || error == -EACCES || error == -EPERM) {
			struct statx s;
			long known = K(statx, at, base, 0, STATX_TYPE, &s);
			if (known < 0) error = known == -ENOENT ? error : known;
			else if ((s.stx_mode & S_IFMT) != S_IFDIR) error = was || error != -EEXIST ? -ENOTDIR : -EEXIST;
			else error = 0;
		}
		if (error == 0 && was && p - base > 3000) {
			long below = K(openat, at, base, O_PATH | O_DIRECTORY | O_CLOEXEC);
			close_at(at);
			if (below < 0) return *p = was, below;
			at = below;
			for (base = p + 1; *base == '/'; base++) {}
		}
		*p = was;
		if (error < 0 || !was) break;
	}
	close_at(at);
	return error;
}

static void strip(char *path)
{
	u64 n = length(path);
	while (n > 1 && path[n - 1] == '/') path[--n] = 0;
}

struct moment { long sec, nsec; };
#define NO_MOMENT ((struct moment){0, (1L << 30) - 2}) /* what the kernel takes for: leave it as it is */

static void stamp(int at, const char *name, struct moment m)
{
	struct moment times[2] = {m, m};
	K(utimensat, at, name, times, 0);
}

/* Seconds, as a decimal number. */
static struct moment moment_of(const char *s)
{
	struct moment m = {0, 0};
	int minus = *s == '-';
	for (m.sec = number(s += minus); digit(*s); s++) {}
	s += *s == '.';
	for (long unit = 100000000; unit; unit /= 10) if (digit(*s)) m.nsec += unit * (*s++ - '0');
	if (minus) m = m.nsec ? (struct moment){-m.sec - 1, 1000000000 - m.nsec} : (struct moment){-m.sec, 0};
	return m;
}

static char *temporary_name(void)
{
	static char name[64];
	u64 salt = 0;
	K(getrandom, &salt, 8, 0);
	put(put_number(put(name, ".lowtide-"), (long)(salt >> 1)), ".part");
	return name;
}

/* What was empty has a size by now: it is written to. What is like /proc never says one. */
static int grown(int fd)
{
	struct statx s;
	return K(statx, fd, "", AT_EMPTY_PATH, STATX_SIZE, &s) < 0 || s.stx_size;
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
	u64 left = s.stx_size ? s.stx_size : ~0UL; /* as much as there is now; /proc says 0 whatever there is */
	for (;;) {
		long n = K(read, fd, block + 4, left < CHUNK ? left : CHUNK);
		if (n == -EINTR) continue;
		if (n > 0 && left == ~0UL && grown(fd)) n = 0;
		if (n <= 0) pass_end(n);
		left -= n;
		u32 head = n;
		memcpy(block, &head, 4);
		if (write_all(1, block, n + 4)) leave(1);
	}
}

/* What comes, or what the file `from` holds, takes the place of a file in one step. `from` is gone then. */
static void write_file(char *given, const char *mode_text, int sync, const char *from, const char *moment)
{
	static char path[4200], target[4200];
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
		if (n >= 4096) fail(-ENAMETOOLONG);
		target[n] = 0;
		if (target[0] == '/') { put(path, target); continue; }
		char *slash = path;
		for (char *p = path; *p; p++) if (*p == '/') slash = p + 1;
		if (slash - path + n >= 4096) fail(-ENAMETOOLONG);
		put(slash, target);
	}
	u64 n = length(path);
	if (!n) fail(-ENOENT);
	if (path[n - 1] == '/') fail(-EISDIR);
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
		if (writable >= 0) K(close, writable);
	} else if (error != -ENOENT) {
		fail(error);
	}
	error = make_dirs(path, 0);
	if (error < 0) fail(error);
	long directory = open_parent(AT_CWD, path, &name);
	if (directory < 0) fail(directory);
	long source = from ? K(openat, AT_CWD, from, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC) : 0;
	if (source < 0) fail(source);
	if (from) {
		if (keep) K(fchown, source, uid, gid);
		error = keep || *mode_text != '-' ? K(fchmod, source, mode) : 0;
		if (error == 0 && !same(moment, "-")) stamp(source, 0, moment_of(moment));
		if (error == 0) error = K(renameat2, AT_CWD, from, directory, name, 0);
		if (error != -EXDEV) finish(error);
	}
	char *temporary = temporary_name();
	long fd = K(openat, directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, *mode_text == '-' && !keep ? 0666 : 0600);
	if (fd < 0) fail(fd);
	if (!from) say(1, "ok\n");
	long total = 0, got;
	while ((error = got = from ? K(read, source, block, CHUNK) : fetch(block, CHUNK)) > 0) {
		if ((error = write_file_all(fd, block, got)) < 0) break;
		total += got;
	}
	if (error == 0 && keep) K(fchown, fd, uid, gid);
	if (error == 0 && (keep || *mode_text != '-')) error = K(fchmod, fd, mode);
	if (error == 0 && !same(moment, "-")) stamp(fd, 0, moment_of(moment));
	if (error == 0 && sync) error = K(fsync, fd);
	if (error == 0 && K(close, fd) < 0) error = -EIO; /* some network file systems say only here that it is full */
	if (error == 0) error = K(renameat2, directory, temporary, directory, name, 0);
	if (error == 0 && sync) {
		long opened = K(openat, directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (opened >= 0) K(fsync, opened);
	}
	if (error < 0) { K(unlinkat, directory, temporary, 0); fail(error); }
	if (from) finish(K(unlinkat, AT_CWD, from, 0));
	done(total);
}

static long describe(int at, const char *path, const char *name)
{
	/* kind size mode mtime (seconds, nanoseconds) NUL name NUL target NUL */
	static char line[9000];
	struct statx s;
	long error = K(statx, at, path, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, &s);
	if (error == -EINVAL) error = K(statx, at, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &s); /* gVisor of 2022 */
	if (error < 0) return error;
	u32 type = s.stx_mode & S_IFMT;
	char *p = put(line, type == S_IFREG ? "f " : type == S_IFDIR ? "d " : type == S_IFLNK ? "l " : "o ");
	p = put(put_number(p, s.stx_size), " ");
	p = put(put_number(p, s.stx_mode & 07777), " ");
	p = put(put_number(p, s.stx_mtime.tv_sec), " ");
	p = put_number(p, s.stx_mtime.tv_nsec) + 1;
	p = put(p, name) + 1;
	if (type == S_IFLNK) {
		long n = K(readlinkat, at, path, p, 4096);
		if (n > 0) p += n;
	}
	*p++ = 0;
	return write_all(1, line, p - line);
}

static void stat_path(char *path)
{
	struct statx s;
	strip(path);
	if (length(path) >= 4096) fail(-ENAMETOOLONG);
	long error = K(statx, AT_CWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &s);
	if (error < 0) fail(error);
	say(1, "ok\n");
	describe(AT_CWD, path, "");
	leave(0);
}

static long listed; /* after its last name: 0, or why there may be more */
#define EACH_NAME(fd, buffer, name) \
	for (long n_, at_; (n_ = listed = K(getdents64, fd, buffer, sizeof buffer)) > 0;) \
		for (at_ = 0; at_ < n_; at_ += *(u16 *)(buffer + at_ + 16)) \
			if ((name = (char *)buffer + at_ + 19), !same(name, ".") && !same(name, ".."))

static void list(const char *path)
{
	static u8 buffer[32768];
	const char *name;
	long fd = K(openat, AT_CWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0) fail(fd);
	say(1, "ok\n");
	EACH_NAME(fd, buffer, name) describe(fd, name, name);
	if (listed < 0) leave(1);
	write_all(1, "", 1); /* an empty record says that this was all */
	leave(0);
}

static long remove_under(int at, const char *name, int depth)
{
	u8 buffer[4096];
	const char *child;
	long error = K(unlinkat, at, name, 0);
	if (error != -EISDIR && error != -EPERM) return error;
	if (depth > 1000) return -ELOOP;
	long fd = K(openat, at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd == -ENOTDIR) return error;
	if (fd == -EACCES) { K(fchmodat, at, name, 0700); fd = K(openat, at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }
	if (fd < 0) return fd;
	for (int again = 1; again;) {
		again = 0;
		K(lseek, fd, 0, 0);
		EACH_NAME(fd, buffer, child) {
			error = remove_under(fd, child, depth + 1);
			if (error == -EACCES && K(fchmod, fd, 0700) >= 0) error = remove_under(fd, child, depth + 1); /* nobody could write here */
			if (error < 0 && error != -ENOENT) { K(close, fd); return error; }
			again = 1;
		}
		if (listed < 0) { K(close, fd); return listed; }
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

/* -- whole trees, as a tar stream -------------------------------------------------------------------- */

#define LONGEST 16384 /* of a member's name */
static char header[512];

static void octal(int at, int width, u64 value)
{
	header[at + --width] = 0;
	while (width--) header[at + width] = '0' + (value & 7), value >>= 3;
}
static void seal(void)
{
	u32 sum = 8 * ' ';
	memcpy(header + 257, "ustar\0" "00", 8);
	for (int i = 0; i < 512; i++) if (i < 148 || i >= 156) sum += (u8)header[i];
	octal(148, 7, sum);
	header[155] = ' ';
	pass(header, 512);
}
static void fill(u64 size) { static u8 zeros[512]; if (size & 511) pass(zeros, 512 - (size & 511)); }
static char *put_record(char *to, const char *key, const char *value)
{
	u64 n = length(key) + length(value) + 3, digits = 1;
	for (u64 all = n + 1; all >= 10; all /= 10) digits++;
	for (u64 all = n + digits; digits < 6; all = n + digits) { u64 d = 0; for (u64 x = all; x; x /= 10) d++; if (d == digits) break; digits++; }
	return put(put(put(put(put(put_number(to, n + digits), " "), key), "="), value), "\n");
}
/* One member's head; what does not fit the old fields goes before it, in a POSIX extended header. */
static void member(const char *name, char type, const struct statx *s, u64 size, const char *link)
{
	static char extra[2 * LONGEST + 400];
	char *p = extra, text[24];
	if (length(name) > 100) p = put_record(p, "path", name);
	if (length(link) > 100) p = put_record(p, "linkpath", link);
	if (size >> 33) { put_number(text, size); p = put_record(p, "size", text); }
	int odd = s->stx_mtime.tv_sec < 0 || s->stx_mtime.tv_sec >> 33;
	if (odd) { put_number(text, s->stx_mtime.tv_sec); p = put_record(p, "mtime", text); }
	for (int pass_number = p == extra; pass_number < 2; pass_number++) {
		memset(header, 0, 512);
		const char *shown = pass_number ? name : "././@PaxHeader";
		u64 n = length(shown), m = length(link);
		memcpy(header, shown, n > 100 ? 100 : n);
		octal(100, 8, s->stx_mode & 07777);
		octal(108, 8, s->stx_uid & 07777777);
		octal(116, 8, s->stx_gid & 07777777);
		octal(124, 12, pass_number ? size & ((1UL << 33) - 1) : (u64)(p - extra));
		octal(136, 12, odd ? 0 : s->stx_mtime.tv_sec);
		put(header + 500, "ns"); /* where every tar has nothing: what its own field has no room for */
		for (u32 i = 9, rest = s->stx_mtime.tv_nsec; i; rest /= 10) header[501 + i--] = '0' + rest % 10;
		header[156] = pass_number ? type : 'x';
		if (pass_number) memcpy(header + 157, link, m > 100 ? 100 : m);
		seal();
		if (!pass_number) { pass(extra, p - extra); fill(p - extra); }
	}
}

/* What other programs pass over: how much of the file before it is real, or a name that cannot be in a tar. */
static void mark(const char *key, const char *value)
{
	static char text[LONGEST + 100];
	u64 n = put_record(text, key, value) - text;
	memset(header, 0, 512);
	put(header, "././@PaxHeader");
	octal(100, 8, 0644);
	octal(124, 12, n);
	header[156] = 'g';
	seal();
	pass(text, n);
	fill(n);
}

static char where[LONGEST], target_of_link[4200];

static void skip(void) { mark("LOWTIDE.skipped", where + 2); }

/* Under which name a file was packed that has more than one. By its time too: the number of one that is gone is
 * soon another's. 0: under none; with `add` it is from now on `where`. What does not fit is packed once for each name. */
struct known { u64 inode; long sec; u32 nsec, device, name, unused; };
#define KNOWN (1 << 18)
#define KNOWN_NAMES (32 << 20)
static char *first_name(const struct statx *s, int add)
{
	static struct known *all;
	static char *names;
	static u32 filled = 1, count;
	u32 device = s->stx_dev_major << 20 ^ s->stx_dev_minor;
	u64 at = (s->stx_ino ^ s->stx_mtime.tv_nsec) * 0x9E3779B97F4A7C15UL >> 46, n = length(where) + 1;
	if (!all) { if (!(all = pages(KNOWN * sizeof *all + KNOWN_NAMES))) return 0; names = (char *)(all + KNOWN); }
	for (; all[at].name; at = (at + 1) % KNOWN)
		if (all[at].inode == s->stx_ino && all[at].device == device && all[at].sec == s->stx_mtime.tv_sec && all[at].nsec == s->stx_mtime.tv_nsec)
			return names + all[at].name;
	if (add && count < KNOWN / 2 && filled + n < KNOWN_NAMES) {
		all[at] = (struct known){s->stx_ino, s->stx_mtime.tv_sec, s->stx_mtime.tv_nsec, device, filled, 0};
		memcpy(names + filled, where, n);
		filled += n;
		count++;
	}
	return 0;
}

/* Exactly as long as announced, whatever happens to it meanwhile. A small one is read before anything is said of it. */
static void pack_file(int fd)
{
	struct statx s, now;
	long n = 0, have = 0;
	char text[24];
	if (K(statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &s) < 0 || (s.stx_mode & S_IFMT) != S_IFREG) { skip(); return; }
	u64 size = s.stx_size, most = size && size < CHUNK ? size : CHUNK;
	while ((u64)have < most && ((n = K(read, fd, block + have, most - have)) > 0 || n == -EINTR)) have += n > 0 ? n : 0;
	if (n < 0 && n != -EINTR && (!size || (size <= CHUNK && !s.stx_blocks))) { skip(); return; } /* as those of /proc and /sys */
	if (n < 0 && n != -EINTR) pass_error(n, where + 2);
	if (!size && have) { /* either it has begun to grow, or it is like /proc and does not say how long it is */
		if (grown(fd)) have = 0;
		else if (have == CHUNK) { skip(); return; }
	}
	if (have < CHUNK) size = have;
	u64 left = size - have, real = size;
	member(where, '0', &s, size, "");
	pass(block, have);
	while (left) {
		n = K(read, fd, block, left < CHUNK ? left : CHUNK);
		if (n == -EINTR) continue;
		if (n < 0) pass_error(n, where + 2);
		if (n == 0 && real == size) real -= left;
		if (n == 0) { n = left < CHUNK ? left : CHUNK; memset(block, 0, n); }
		pass(block, n);
		left -= n;
	}
	fill(size);
	if (K(statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &now) < 0 || real != size || now.stx_size != s.stx_size
		|| now.stx_mtime.tv_sec != s.stx_mtime.tv_sec || now.stx_mtime.tv_nsec != s.stx_mtime.tv_nsec) {
		put_number(text, real);
		mark("LOWTIDE.read", text);
	}
	if (s.stx_nlink > 1) first_name(&s, 1);
}

static int gone(long error) { return error == -ENOENT || error == -ESRCH || error == -ENOTDIR || error == -ELOOP || error == -ESTALE; }

static void pack(int at, const char *name, u64 end, int depth)
{
	u8 buffer[2048];
	struct statx s;
	const char *child, *first;
	long error = K(statx, at, name, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &s);
	if (gone(error) && depth) return; /* since it was listed */
	if (error < 0) pass_error(error, where + 2);
	u32 type = s.stx_mode & S_IFMT;
	if (type == S_IFLNK) {
		long n = K(readlinkat, at, name, target_of_link, 4096);
		if (gone(n)) return;
		if (n < 0) { skip(); return; } /* one of /proc that does not say where it leads */
		target_of_link[n] = 0;
		member(where, '2', &s, 0, target_of_link);
	} else if (type == S_IFIFO) {
		member(where, '6', &s, 0, "");
	} else if (type == S_IFREG && s.stx_nlink > 1 && (first = first_name(&s, 0))) {
		member(where, '1', &s, 0, first);
	} else if (type == S_IFREG) {
		long fd = K(openat, at, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		if (gone(fd)) return;
		if (fd < 0 && (!s.stx_size || !s.stx_blocks)) { skip(); return; }
		if (fd < 0) pass_error(fd, where + 2);
		pack_file(fd);
		K(close, fd);
	} else if (type == S_IFDIR) {
		if (depth > 1000) pass_error(-ELOOP, where + 2);
		long fd = K(openat, at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (gone(fd) && depth) return;
		if (fd < 0) pass_error(fd, where + 2);
		if (end + 2 >= LONGEST) pass_end(-ENAMETOOLONG);
		where[end] = '/'; where[end + 1] = 0;
		member(where, '5', &s, 0, "");
		EACH_NAME(fd, buffer, child) {
			u64 n = length(child);
			if (end + n + 2 >= LONGEST) pass_end(-ENAMETOOLONG);
			memcpy(where + end + 1, child, n + 1);
			pack(fd, child, end + 1 + n, depth + 1);
		}
		where[end] = 0;
		if (listed < 0 && !gone(listed)) pass_error(listed, where + 2);
		K(close, fd);
	} else {
		skip();
	}
}

static void read_tree(char *path)
{
	static u8 end[1024];
	long fd = K(openat, AT_CWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0) fail(fd);
	say(1, "ok\n");
	put(where, ".");
	pack(fd, ".", 1, 0);
	pass(end, 1024);
	pass_end(0);
}

static long fetch_all(void *to, u64 n)
{
	u8 *p = to;
	while (n) {
		long got = fetch(p, n > CHUNK ? CHUNK : n);
		if (got < 0) return got;
		if (got == 0) return -EPROTO;
		p += got; n -= got;
	}
	return 0;
}
static u64 parse(const char *at, int width)
{
	u64 value = 0;
	if ((u8)*at & 0x80) { /* GNU: base 256 */
		for (int i = 1; i < width; i++) value = value << 8 | (u8)at[i];
		return value;
	}
	for (int i = 0; i < width && (at[i] == ' ' || digit(at[i])); i++) if (digit(at[i])) value = value << 3 | (at[i] & 7);
	return value;
}

static char member_name[LONGEST], link_name[LONGEST];
static u8 *folders; /* the directories' modes and times: last, or a read-only one could not be filled */
static u64 folders_filled;
#define FOLDERS (16UL << 20)
struct folder { struct moment moment; u32 mode, size; };

static void settle_folder(char *name, u32 mode, struct moment moment)
{
	int at = walk_down(&name);
	K(fchmodat, at, name, mode);
	stamp(at, name, moment);
	close_at(at);
}
/* The last first: one that nobody may enter keeps what is in it from being settled. */
static void settle_folders(void)
{
	for (u64 at = FOLDERS - folders_filled; at < FOLDERS;) {
		struct folder f;
		memcpy(&f, folders + at, sizeof f);
		settle_folder((char *)folders + at + sizeof f, f.mode, f.moment);
		at += sizeof f + f.size;
	}
}
/* Until the end it can be written to, whatever it may be for. */
static void keep_folder(char *name, u32 mode, struct moment moment)
{
	struct folder f = {moment, mode, (u32)length(name) + 1};
	if (folders_filled + sizeof f + f.size > FOLDERS) { settle_folder(name, mode, moment); return; }
	settle_folder(name, mode | 0700, NO_MOMENT);
	folders_filled += sizeof f + f.size;
	memcpy(folders + FOLDERS - folders_filled, &f, sizeof f);
	memcpy(folders + FOLDERS - folders_filled + sizeof f, name, f.size);
}

/* Within the tree and nowhere else: no way up, not from the root. */
static char *inward(char *name)
{
	for (;;) {
		if (*name == '/') name++;
		else if (name[0] == '.' && (name[1] == '/' || !name[1])) name += name[1] ? 2 : 1;
		else break;
	}
	for (char *p = name; *p;) {
		if (p[0] == '.' && p[1] == '.' && (p[2] == '/' || !p[2])) return 0;
		while (*p && *p != '/') p++;
		while (*p == '/') p++;
	}
	strip(name);
	return name;
}

/* What is to come, each with its kind before it and a NUL after: nothing is touched where it cannot take its place. */
static long refuse(char *wanted, char *end)
{
	struct statx s, link;
	for (char *next; wanted < end; wanted = next) {
		int folder = *wanted == 'd';
		next = wanted + length(wanted) + 1;
		char *name = inward(wanted + 1);
		if (!name || !*name) continue;
		int at = walk_down(&name);
		if (at < 0 && at != AT_CWD) continue;
		long there = K(statx, at, name, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &link), error = folder ? K(statx, at, name, 0, STATX_TYPE, &s) : there;
		close_at(at);
		if (there < 0) continue;
		if (!folder && (link.stx_mode & S_IFMT) == S_IFDIR) return -EISDIR;
		if (folder && (error < 0 || (s.stx_mode & S_IFMT) != S_IFDIR)) return -ENOTDIR;
	}
	return 0;
}

/* The extended header's records that matter here. An error where one of them says that the tree cannot be taken. */
static long extended(char *text, u64 n, u64 *size, int *sized, struct moment *moment)
{
	long error = 0;
	for (char *p = text, *end = text + n; p < end;) {
		long all = number(p);
		char *key = p;
		while (key < end && digit(*key)) key++;
		if (all <= 0 || all > end - p || key - p + 2 > all || *key != ' ') return error;
		char *value = ++key, *last = p + all - 1;
		while (value < last && *value != '=') value++;
		if (value < last) {
			*value++ = 0; *last = 0;
			if (same(key, "path") && last - value < LONGEST) put(member_name, value);
			if (same(key, "linkpath") && last - value < LONGEST) put(link_name, value);
			if (same(key, "size")) *size = number(value), *sized = 1;
			if (same(key, "mtime")) *moment = moment_of(value);
			if (same(key, "LOWTIDE.wanted") && error == 0) error = refuse(value, last);
		}
		p += all;
	}
	return error;
}

static long unpack_file(int at, char *name, u32 mode, struct moment moment, u64 size)
{
	char *last, *temporary = temporary_name();
	long directory = open_parent(at, name, &last), error;
	if (directory < 0) return directory;
	long fd = K(openat, directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	error = fd < 0 ? fd : 0;
	while (error == 0 && size) {
		long got = fetch(block, size < CHUNK ? size : CHUNK);
		if (got <= 0) { error = got < 0 ? got : -EPROTO; break; }
		size -= got;
		error = write_file_all(fd, block, got);
	}
	if (error == 0) error = K(fchmod, fd, mode);
	if (error == 0) stamp(fd, 0, moment);
	if (fd >= 0) K(close, fd);
	if (error == 0) error = K(renameat2, directory, temporary, directory, last, 0);
	if (error < 0 && fd >= 0) K(unlinkat, directory, temporary, 0);
	K(close, directory);
	return error;
}

/* A link or a pipe, in the place of what is there in one step. */
static long unpack_other(int at, char *name, char type, u32 mode)
{
	char *last, *temporary = temporary_name(), *link;
	long directory = open_parent(at, name, &last), error = -EINVAL;
	if (directory < 0) return directory;
	if (type == '2') {
		error = K(symlinkat, link_name, directory, temporary);
	} else if (type == '6') {
		error = K(mknodat, directory, temporary, S_IFIFO | mode, 0);
	} else if ((link = inward(link_name))) {
		int from = walk_down(&link);
		error = K(linkat, from, link, directory, temporary, 0);
		close_at(from);
	}
	if (error == 0) error = K(renameat2, directory, temporary, directory, last, 0);
	K(unlinkat, directory, temporary, 0); /* also where both were the same file already: then nothing was renamed */
	K(close, directory);
	return error;
}

static void write_tree(char *path)
{
	static char text[2 * LONGEST + 400];
	u64 size = 0, given = 0;
	int sized = 0, long_name = 0, long_link = 0;
	struct moment moment = NO_MOMENT;
	strip(path);
	long error = make_dirs(path, 1), got;
	if (error == 0) error = K(chdir, path);
	if (error < 0) fail(error);
	folders = pages(FOLDERS);
	if (!folders) fail(-ENOMEM);
	struct statx top;
	if (K(statx, AT_CWD, ".", 0, STATX_MODE, &top) == 0 && (top.stx_mode & 0300) != 0300) keep_folder(".", top.stx_mode & 07777, NO_MOMENT);
	say(1, "ok\n");
	for (;;) {
		error = fetch_all(header, 512);
		if (error < 0) break;
		if (!header[0] && !header[156]) { /* the end; what pads it is read, so that nobody waits */
			while ((got = fetch(block, CHUNK)) > 0) {}
			error = got;
			break;
		}
		char type = header[156];
		size = parse(header + 124, 12);
		if (size >> 62) { error = -EINVAL; break; }
		if (type == 'x' || type == 'L' || type == 'K' || (type == 'g' && size < sizeof text)) {
			if (size >= sizeof text) { error = -ENAMETOOLONG; break; }
			memset(text, 0, sizeof text);
			if ((error = fetch_all(text, size)) < 0 || (error = fetch_all(block, -size & 511)) < 0) break;
			if (type == 'g') {
				u64 unused; int none; struct moment never;
				if ((error = extended(text, size, &unused, &none, &never)) < 0) break;
				member_name[0] = link_name[0] = 0;
			} else if (type == 'x') {
				extended(text, size, &given, &sized, &moment);
			} else if (length(text) < LONGEST) {
				put(type == 'L' ? member_name : link_name, text);
			}
			continue;
		}
		long_name = member_name[0]; long_link = link_name[0];
		if (sized) size = given;
		if (!long_name) { /* the old fields: a prefix, and a name that may have no end */
			char *p = member_name;
			if (same(header + 257, "ustar") && header[345]) { memcpy(p, header + 345, 155); p[155] = 0; p += length(p); *p++ = '/'; }
			memcpy(p, header, 100); p[100] = 0;
		}
		if (!long_link) { memcpy(link_name, header + 157, 100); link_name[100] = 0; }
		u32 mode = parse(header + 100, 8) & 07777;
		int fraction = header[500] == 'n' && header[501] == 's';
		for (int i = 502; i < 511; i++) fraction &= digit(header[i]);
		if (moment.nsec == NO_MOMENT.nsec) moment = (struct moment){parse(header + 136, 12), 0};
		if (fraction && !moment.nsec) { header[511] = 0; moment.nsec = number(header + 502); }
		char *name = inward(member_name), *rest = name;
		u64 n = length(member_name);
		int folder = type == '5' || (type == 0 && n && member_name[n - 1] == '/');
		if (!name) { error = -EINVAL; break; }
		if (*name) error = make_dirs(name, folder);
		if (error < 0) break;
		int at = folder ? AT_CWD : walk_down(&rest);
		if (at < 0 && at != AT_CWD) { error = at; break; }
		if (folder) {
			if (*name) keep_folder(name, mode, moment);
		} else if (*name && (type == '0' || type == 0 || type == '7')) {
			error = unpack_file(at, rest, mode, moment, size);
			if (error == 0) error = fetch_all(block, -size & 511);
			size = 0;
		} else if (*name && (type == '2' || type == '1' || type == '6')) {
			error = unpack_other(at, rest, type, mode);
			size = 0;
		}
		close_at(at);
		if (error < 0) break;
		for (u64 left = size ? (size + 511) & ~511UL : 0; left && error == 0;) { /* of a kind that is not for us */
			got = fetch(block, left < CHUNK ? left : CHUNK);
			if (got <= 0) error = got < 0 ? got : -EPROTO;
			else left -= got;
		}
		if (error < 0) break;
		member_name[0] = link_name[0] = 0;
		sized = 0;
		moment = NO_MOMENT;
	}
	settle_folders();
	finish(error);
}

/* -- a TCP port of the sandbox ------------------------------------------------------------------------ */

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
	/* Neither way waits for the other: a service may take no more before somebody takes what it says. */
	static u8 inward[CHUNK];
	struct { int from, to; u8 *data; u32 at, end; } ways[2] = {{0, fd, inward, 0, 0}, {fd, 1, block, 0, 0}};
	K(fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK);
	K(fcntl, 1, F_SETFL, O_WRONLY | O_NONBLOCK);
	for (;;) {
		struct pollfd w[2];
		for (int i = 0; i < 2; i++) {
			int full = ways[i].at < ways[i].end;
			w[i] = (struct pollfd){.fd = full ? ways[i].to : ways[i].from, .events = full ? POLLOUT : POLLIN};
		}
		if (K(ppoll, w, 2, 0, 0, 0) < 0) continue;
		for (int i = 0; i < 2; i++) {
			if (!w[i].revents) continue;
			long n = 1;
			if (ways[i].at == ways[i].end && (n = K(read, ways[i].from, ways[i].data, CHUNK)) > 0) ways[i].at = 0, ways[i].end = n;
			if (n > 0 && (n = K(write, ways[i].to, ways[i].data + ways[i].at, ways[i].end - ways[i].at)) > 0) ways[i].at += n;
			if (n > 0 || n == -EAGAIN || n == -EINTR) continue;
			if (i) leave(0);
			ways[0].from = -1; ways[0].at = ways[0].end;
			K(shutdown, fd, 1);
		}
	}
}

static __attribute__((noreturn)) void call(char **argv, int argc)
{
	const char *what = argv[0], *second = argc > 2 ? argv[2] : "-";
	u64 pipe = 1UL << (SIGPIPE - 1);
	K(rt_sigprocmask, SIG_BLOCK, &pipe, 0, 8);
	if (argc < 2) fail(-EINVAL);
	if (same(what, "read")) read_file(argv[1]);
	if (same(what, "write")) write_file(argv[1], second, argc > 3 && argv[3][0] == 's', 0, argc > 4 ? argv[4] : "-");
	if (same(what, "replace")) write_file(argv[1], second, 0, argc > 3 ? argv[3] : "", argc > 4 ? argv[4] : "-");
	if (same(what, "list")) list(argv[1]);
	if (same(what, "stat")) stat_path(argv[1]);
	if (same(what, "mkdir")) { strip(argv[1]); finish(make_dirs(argv[1], 1)); }
	if (same(what, "remove")) remove_path(argv[1], second[0] == 'r');
	if (same(what, "pack")) read_tree(argv[1]);
	if (same(what, "unpack")) write_tree(argv[1]);
	if (same(what, "connect")) pass_on(number(argv[1]));
	fail(-ENOSYS);
}

/* -- clients: a stream of bytes each way that outlives its channel ------------------------------------ */

/* A packet either way: length of what follows (4 bytes), the offset of its first byte in the stream (8),
 * how much of the other stream has been taken (8), then bytes of the stream. The first packet of a channel is
 * a greeting instead. In text mode a packet is a line: `~`, base64. Other lines are noise. */
#define HEAD 20
#define PACKET 32768         /* most bytes of the stream in one packet */
#define WIRE 65536           /* room for one packet as it travels, also in text */
#define REPLAY (1024 * 1024) /* of what we said, kept until it has arrived */
#define RESERVE (160 * 1024) /* of that, for what one packet of requests may make us say */
#define FRAME (4 * 1024 * 1024)
#define CLIENTS 16
#ifndef BOUND_MS
#define BOUND_MS 120000 /* how long a client may be without a channel, or not take what we say */
#endif
#define GREETING_MS 10000
#define ONCE_MS 150 /* for a channel that hears nothing more: then whoever waits for it comes again */
#define BLIND_MS 20 /* between two tries where the kernel does not tell what is ready */
#define TOLD (256 * 1024)
#define MEMORY (6 * WIRE + REPLAY + FRAME)

static struct client {
	int used, known, link, in, out, text;
	long since; /* when the channel came, was heard, or went */
	long once;  /* until when a channel whose input has ended may answer; 0: it ends with its input */
	u64 id, stored, told, said, sent, arrived; /* offsets: theirs that came, that we confirmed; ours said, sent, confirmed */
	u32 wire_filled, from, to, filled, ahead; /* ahead: still to come over `link`, before anything from `in` */
	u8 *wire, *out_wire, *ring, *stream;
} clients[CLIENTS];

static u8 key[16], proof[16];
static int have_key;
static const char MAGIC[] = "LOWTIDE1";
enum { NEW = 0, AGAIN, FORGOTTEN, REFUSED_KEY };

static void free_client(struct client *c);

static void unplug(struct client *c)
{
	shut(&c->in); shut(&c->out); shut(&c->link);
	c->wire_filled = c->from = c->to = c->ahead = 0;
	c->since = now_ms();
	if (!c->known) c->used = 0;
}

static u64 room(struct client *c) { return REPLAY - (c->said - c->arrived); }

static void push(u8 *ring, u64 *filled, const void *data, u32 n)
{
	const u8 *p = data;
	while (n) {
		u32 at = *filled % REPLAY, now = REPLAY - at < n ? REPLAY - at : n;
		memcpy(ring + at, p, now);
		*filled += now; p += now; n -= now;
	}
}
static void pull(const u8 *ring, u64 from, u8 *to, u32 n)
{
	while (n) {
		u32 at = from % REPLAY, now = REPLAY - at < n ? REPLAY - at : n;
		memcpy(to, ring + at, now);
		from += now; to += now; n -= now;
	}
}

static void frame(struct client *c, u8 kind, u32 id, const void *data, u32 n)
{
	u8 head[9];
	u32 all = n + 5;
	if (!c || room(c) < n + 9) return; /* RESERVE makes sure that there is room */
	memcpy(head, &all, 4);
	head[4] = kind;
	memcpy(head + 5, &id, 4);
	push(c->ring, &c->said, head, 9);
	push(c->ring, &c->said, data, n);
}
static void frame_number(struct client *c, u8 kind, u32 id, u32 value) { frame(c, kind, id, &value, 4); }

static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Make what lies at out_wire + WIRE ready for the way. */
static void dispatch(struct client *c, u32 n)
{
	u8 *packet = c->out_wire + WIRE;
	u32 all = n + HEAD - 4;
	memcpy(packet, &all, 4);
	c->told = c->stored - c->filled; /* what waits to be processed is not confirmed: so it never exceeds a frame */
	memcpy(packet + 12, &c->told, 8);
	c->from = 0;
	n += HEAD;
	if (!c->text) { memcpy(c->out_wire, packet, n); c->to = n; return; }
	u8 *p = c->out_wire;
	*p++ = '~';
	for (u32 i = 0; i < n; i += 3) {
		u32 v = packet[i] << 16 | (i + 1 < n ? packet[i + 1] << 8 : 0) | (i + 2 < n ? packet[i + 2] : 0);
		*p++ = DIGITS[v >> 18]; *p++ = DIGITS[v >> 12 & 63];
		*p++ = i + 1 < n ? DIGITS[v >> 6 & 63] : '=';
		*p++ = i + 2 < n ? DIGITS[v & 63] : '=';
	}
	*p++ = '\n';
	c->to = p - c->out_wire;
}

static void transmit(struct client *c)
{
	while (c->out >= 0) {
		if (c->from < c->to) {
			long n = K(write, c->out, c->out_wire + c->from, c->to - c->from);
			if (n == -EINTR) continue;
			if (n == -EAGAIN) return;
			if (n <= 0) { unplug(c); return; }
			c->from += n;
			continue;
		}
		u64 left = c->said - c->sent;
		if (!c->known || (!left && c->stored - c->filled - c->told < TOLD)) return;
		u32 n = left < PACKET ? left : PACKET;
		u8 *packet = c->out_wire + WIRE;
		memcpy(packet + 4, &c->sent, 8);
		pull(c->ring, c->sent, packet + HEAD, n);
		c->sent += n;
		dispatch(c, n);
	}
}

static void greet(struct client *c, u8 status)
{
	u8 *p = c->out_wire + WIRE + HEAD;
	u32 self = K(getpid);
	u64 none = 0;
	memcpy(c->out_wire + WIRE + 4, &none, 8);
	memcpy(p, MAGIC, 8);
	if (status <= AGAIN) memcpy(p + 8, proof, 16); else memset(p + 8, 0, 16);
	memcpy(p + 24, &c->stored, 8);
	p[32] = status;
	memcpy(p + 33, &self, 4);
	dispatch(c, 37);
	if (status > AGAIN) { K(write, c->out, c->out_wire, c->to); unplug(c); } /* whoever it is, he is not waited for */
}

/* The first packet of a channel: magic, key, which client, whether it comes again, what it has of ours. */
static struct client *greeted(struct client *c, const u8 *data, u32 n)
{
	u64 id, have;
	u32 wrong = 0;
	if (n != 41) { unplug(c); return 0; }
	for (int i = 0; i < 8; i++) wrong |= data[i] ^ MAGIC[i];
	if (wrong) { unplug(c); return 0; }
	if (!have_key) { memcpy(key, data + 8, 16); have_key = 1; }
	for (int i = 0; i < 16; i++) wrong |= data[8 + i] ^ key[i];
	if (wrong) { greet(c, REFUSED_KEY); return 0; }
	memcpy(&id, data + 24, 8);
	memcpy(&have, data + 33, 8);
	for (int i = 0; i < CLIENTS; i++) {
		struct client *old = &clients[i];
		if (!old->used || !old->known || old->id != id) continue;
		if (have > old->said || have < old->arrived) { greet(c, FORGOTTEN); return 0; }
		unplug(old); /* the newest channel counts: the old one may not know yet that it is dead */
		old->in = c->in; old->out = c->out; old->link = c->link; old->text = c->text; old->once = c->once; old->ahead = c->ahead;
		memcpy(old->wire, c->wire, c->wire_filled);
		old->wire_filled = c->wire_filled;
		old->since = now_ms();
		c->in = c->out = c->link = -1;
		c->used = 0;
		old->arrived = old->sent = have;
		greet(old, AGAIN);
		return old;
	}
	if (data[32]) { greet(c, FORGOTTEN); return 0; }
	c->known = 1;
	c->id = id;
	greet(c, NEW);
	return c;
}

static struct client *new_client(void)
{
	struct client *c = 0;
	for (int i = 0; i < CLIENTS && !c; i++) if (!clients[i].used) c = &clients[i];
	for (int i = 0; i < CLIENTS && !c; i++) if (!clients[i].known) { unplug(&clients[i]); c = &clients[i]; }
	for (int i = 0; i < CLIENTS; i++) /* the one that has been away for longest */
		if (clients[i].used && clients[i].in < 0 && (!c || (c->used && clients[i].since < c->since))) c = &clients[i];
	if (!c) return 0;
	if (c->used) free_client(c);
	u8 *memory = c->wire ? c->wire : pages(MEMORY);
	if (!memory) return 0;
	*c = (struct client){.used = 1, .link = -1, .in = -1, .out = -1, .since = now_ms(), .wire = memory};
	c->out_wire = memory + 2 * WIRE;
	c->ring = c->out_wire + 3 * WIRE;
	c->stream = c->ring + REPLAY;
	return c;
}

/* -- commands ---------------------------------------------------------------------------------------- */

/* A frame: length of what follows (4 bytes), kind (1), which command (4), then the rest. */
enum { START = 1, INPUT, INPUT_END, SIGNAL, END, CREDIT, RESIZE, RENEW, FORGET, BYE, SETTLE, LOG };       /* to us */
enum { STDOUT = 1, STDERR, EXITED, STARTED, INPUT_BROKEN, INPUT_TAKEN, REFUSED, ENDED, RENEWED, LEFT };  /* from us */
enum { WANTS_INPUT = 1, TERMINAL = 2, CALL = 4 };

#define COMMANDS 1024
#define WINDOW (256 * 1024) /* how much standard input may wait here for one command */
#define PIECE 32768
#define END_MS 10000 /* after the grace: how long what does not die is tried */
#define HUNG_MS 50

static struct command {
	struct client *client; /* 0: nobody reads it */
	u32 id;
	int used, call, pid, child, in, out, err, status, exited, said, code, input_over, deaf, keeper_gone, terminal;
	int ending, ended, living;
	long end_from, end_grace, end_next, end_pause;
	int left, settling, rest[2]; /* it has exited and others hold its streams; as much of them is still read */
	int open_line; /* what was typed last was no end of a line */
	long hung; /* nobody had its terminal open: when to look again whether somebody has */
	u8 signals[8]; /* that came before the child was known, in their order */
	long credit; /* how much output the other side will take */
	u8 *input;
	u32 from, to;
	u64 mark; /* 0: its keeper gets its orphans */
	int reader, follows; /* no command: a client reads the log from `at` to `log_end`, and on */
	u64 at, log_end;     /* when all is said: where that ends in the client's stream */
} commands[COMMANDS];
static long strays_next, strays_from, deadline, cap;
static int strays_left, main_command = -1, as_init, guarded;
/* Each command has four descriptors, and `ppoll` takes no more than may be open: so we may have as many as there can be, and
 * our commands have the limit that we found. */
#define RLIMIT_NOFILE 7
#define FILES(commands) (2 + 3 * CLIENTS + 4 * (commands) + 16)
static u64 files_before[2];
static int most_commands = COMMANDS;
static u8 *log_ring; /* of what the main command printed, the last REPLAY bytes; 0: it prints to our own streams, and no more */
static u64 logged;
static long over; /* when the main command had ended: then whoever reads the log has LAST_MS to hear the rest */
static int last_code;
#define LAST_MS 2000

static void free_client(struct client *c)
{
	for (int i = 0; i < COMMANDS; i++)
		if (commands[i].used && commands[i].client == c) {
			commands[i].client = 0;
			commands[i].deaf = 1;
			shut(&commands[i].in); /* nobody will ever send the rest */
		}
	unplug(c);
	c->used = c->known = 0;
	K(madvise, c->wire, MEMORY, 4); /* not needed */
}

static struct command *find_command(struct client *c, u32 id)
{
	for (int i = 0; i < COMMANDS; i++) if (commands[i].used && commands[i].client == c && commands[i].id == id) return &commands[i];
	return 0;
}

static void note(int fd, u8 kind, u32 value)
{
	u8 data[5] = {kind};
	memcpy(data + 1, &value, 4);
	write_all(fd, data, 5);
}

/* Never to have CAP_SETPCAP again. The kernel lets nobody look into a process that may do more than he. */
static void lose_setpcap(void)
{
	struct { u32 version; int pid; } head = {0x20080522, 0};
	u32 sets[6]; /* effective, permitted, inheritable; then the upper halves */
	K(prctl, PR_CAPBSET_DROP, 8);
	if (K(capget, &head, sets) < 0) leave(126);
	for (int i = 0; i < 3; i++) sets[i] &= ~(1u << 8);
	if (K(capset, &head, sets) < 0) leave(126);
}

static __attribute__((noreturn)) void start_inside(u8 *data, u32 n, int in, int out, int err, int status)
{
	/* flags, rows, columns, argc, number of variables; then cwd, user, arguments, variables, each with its NUL */
	static char *argv[65537], *variables[16385];
	u16 argc, count;
	int flags = data[0], have = 0;
	memcpy(&argc, data + 5, 2);
	memcpy(&count, data + 7, 2);
	char *p = (char *)data + 9, *end = (char *)data + n, *cwd = p, *user;
	p += length(p) + 1;
	user = p < end ? p : end - 1;
	p += p < end ? length(p) + 1 : 0;
	u32 words = 0;
	while (words < argc && p < end) { argv[words++] = p; p += length(p) + 1; }
	if (!words) leave(126);
	if (count > 8192) count = 8192;
	for (u32 i = 0; i < count && p < end; i++) { variables[have++] = p; p += length(p) + 1; }
	u32 own = have;
	for (char **e = environment; *e && have < 16000; e++) {
		int taken = 0;
		for (u32 i = 0; i < own && !taken; i++) {
			const char *a = *e, *b = variables[i];
			while (*a && *a == *b && *a != '=') a++, b++;
			taken = *a == '=' && *b == '=';
		}
		if (!taken) variables[have++] = *e;
	}
	environment = variables;
	K(dup3, in, 0, 0); K(dup3, out, 1, 0); K(dup3, err, 2, 0);
	if (flags & CALL) {
		close_from(3);
		if (*user && become_user(user, 0)) fail(-EPERM);
		call(argv, words);
	}
	K(prctl, PR_SET_CHILD_SUBREAPER, 1);
	long child = K(clone, SIGCHLD);
	if (child == 0) {
		K(setsid);
		if (flags & TERMINAL) K(ioctl, 0, TIOCSCTTY, 0);
		if (orphans_are_ours) {
			u64 limit[2] = {last_mark, ~0UL};
			K(prlimit64, 0, RLIMIT_RSS, limit, 0);
		}
		if (guarded) lose_setpcap();
		if (*user) {
			int error = become_user(user, flags & TERMINAL);
			if (error) { note(status, 'R', error); leave(126); }
			int homed = 0;
			for (u32 i = 0; i < own; i++) homed |= begins(variables[i], "HOME=");
			for (int i = own; i < have && !homed && home[5]; i++) if (begins(variables[i], "HOME=")) variables[i] = home, homed = 1;
			if (!homed && home[5]) variables[have++] = home;
		}
		K(prlimit64, 0, RLIMIT_NOFILE, files_before, 0);
		block_signals(0);
		if (*cwd && K(chdir, cwd) < 0) {
			say(2, "lowtide: cannot enter the working directory "); say(2, cwd); say(2, "\n");
			leave(126);
		}
		execute(argv);
	}
	if (child < 0) { note(status, 'R', -child); leave(0); }
	note(status, 'P', child);
	K(dup3, status, 3, O_CLOEXEC);
	K(close, 0); K(close, 1); K(close, 2);
	close_from(4);
	/* The keeper: everything the command leaves behind falls to it, so it stays until nothing is left. */
	for (;;) {
		int state;
		long pid = K(wait4, -1, &state, 0, 0);
		if (pid == child) note(3, 'E', exit_code(state));
		if (pid == -ECHILD) leave(0);
	}
}

static int open_terminal(const u8 *data, int *master)
{
	char path[64];
	u16 size[4] = {0};
	int unlock = 0, which = 0;
	long fd = K(openat, AT_CWD, "/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) fd = K(openat, AT_CWD, "/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) return fd;
	long error = K(ioctl, fd, TIOCSPTLCK, &unlock);
	if (error >= 0) error = K(ioctl, fd, TIOCGPTN, &which);
	put(put_number(put(path, "/dev/pts/"), which), "");
	long slave = error < 0 ? error : K(openat, AT_CWD, path, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (slave < 0) { K(close, fd); return slave; }
	memcpy(size, data + 1, 4);
	K(ioctl, fd, TIOCSWINSZ, size);
	K(fchmod, slave, 0620);
	*master = fd;
	return slave;
}

static struct command *start(struct client *owner, u32 id, u8 *data, u32 n)
{
	struct command *c = 0;
	for (int i = 0; i < most_commands && !c; i++) if (!commands[i].used) c = &commands[i];
	int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, status[2] = {-1, -1}, flags = data[0];
	if (!c || keeper_count >= KEEPERS || n < 12 || data[n - 1] || find_command(owner, id)) { frame_number(owner, REFUSED, id, EAGAIN); return 0; }
	long error = 0;
	if (flags & TERMINAL) {
		error = in[0] = open_terminal(data, &out[0]);
		if (error >= 0) error = out[1] = copy(in[0]);
		if (error >= 0) error = err[1] = copy(in[0]);
		if (error >= 0) error = in[1] = copy(out[0]);
	} else {
		error = flags & WANTS_INPUT ? K(pipe2, in, O_CLOEXEC) : (in[0] = K(openat, AT_CWD, "/dev/null", O_RDONLY | O_CLOEXEC)) < 0 ? in[0] : 0;
		if (!owner && !log_ring) { out[1] = copy(1); err[1] = copy(2); }
		else if (error >= 0 && (error = K(pipe2, out, O_CLOEXEC)) >= 0) error = K(pipe2, err, O_CLOEXEC);
	}
	if (error >= 0 && !(flags & CALL)) error = K(pipe2, status, O_CLOEXEC);
	if (error >= 0 && in[1] >= 0 && !c->input && !(c->input = pages(WINDOW))) error = -ENOMEM;
	last_mark++;
	long pid = error < 0 ? error : K(clone, SIGCHLD);
	if (pid == 0) start_inside(data, n, in[0], out[1], err[1], status[1]);
	shut(&in[0]); shut(&out[1]); shut(&err[1]); shut(&status[1]);
	if (pid < 0) {
		shut(&in[1]); shut(&out[0]); shut(&err[0]); shut(&status[0]);
		frame_number(owner, REFUSED, id, -pid);
		return 0;
	}
	if (in[1] >= 0) K(fcntl, in[1], F_SETFL, O_RDWR | O_NONBLOCK);
	if (out[0] >= 0) K(fcntl, out[0], F_SETFL, O_RDWR | O_NONBLOCK);
	if (err[0] >= 0) K(fcntl, err[0], F_SETFL, O_RDWR | O_NONBLOCK);
	if (status[0] >= 0) K(fcntl, status[0], F_SETFL, O_RDONLY | O_NONBLOCK);
	keepers[keeper_count++] = pid;
	u8 *input = c->input;
	*c = (struct command){.used = 1, .client = owner, .id = id, .pid = pid, .in = in[1], .out = out[0], .err = err[0], .status = status[0],
		.call = flags & CALL, .terminal = flags & TERMINAL, .credit = REPLAY, .input = input, .mark = orphans_are_ours ? last_mark : 0};
	frame_number(owner, STARTED, id, pid);
	return c;
}

static void feed(struct command *c)
{
	while (c->in >= 0) {
		if (c->from == c->to) {
			c->from = c->to = 0;
			if (c->input_over != 1 || !c->terminal) break;
			/* The end as a person types it: once more after an open line, which the first one only hands over.
			 * A terminal that is full takes not even this, so it waits its turn as all input does. */
			c->input[c->to++] = 4;
			if (c->open_line) c->input[c->to++] = 4;
			c->input_over = 2;
		}
		if (c->client && room(c->client) < RESERVE) return;
		long n = K(write, c->in, c->input + c->from, c->to - c->from);
		if (n == -EINTR) continue;
		if (n == -EAGAIN) return;
		if (n < 0) { shut(&c->in); frame(c->client, INPUT_BROKEN, c->id, 0, 0); return; }
		c->from += n;
		c->open_line = c->input[c->from - 1] != '\n';
		if (c->input_over < 2) frame_number(c->client, INPUT_TAKEN, c->id, n);
	}
	if (c->input_over) shut(&c->in);
}

/* What the main command prints goes into the log, and on to our own stream: no faster than that is read, as if it had it
 * itself. So no more at once than a pipe takes that has room at all. When it has ended, the stream has LAST_MS to take
 * the rest. True when nothing is left to read for now. */
static int drain_main(struct command *c, int *fd, u8 kind)
{
	static u8 data[4096];
	struct { long sec, nsec; } none = {0, 0};
	for (int rounds = 0; *fd >= 0 && rounds < 256; rounds++) {
		struct pollfd own = {.fd = kind, .events = POLLOUT};
		int full = c->rest[kind - 1] = K(ppoll, &own, 1, &none, 0, 0) == 0;
		if (full && c->exited && !c->end_from) c->end_from = now_ms();
		if (full && !(c->exited && now_ms() - c->end_from > LAST_MS)) return 0;
		long n = K(read, *fd, data, sizeof data);
		if (n == -EINTR) continue;
		if (n == -EAGAIN) return 1;
		if (n <= 0) { shut(fd); return 1; }
		push(log_ring, &logged, data, n);
		if (!full) K(write, kind, data, n);
	}
	return c->exited;
}

/* The log as far as credit and room go. On the second stream stands what is no log: 0, what was here is not kept any
 * more, said only to who takes more: it comes without credit; 1, this was all when it was asked for. */
static void tell_log(struct command *c)
{
	static u8 data[PIECE];
	while (c->client && !c->deaf && !c->said && room(c->client) >= RESERVE + PIECE + 9) {
		if (logged - c->at > REPLAY && c->credit > 0) { c->at = logged - REPLAY; frame(c->client, STDERR, c->id, "\0", 1); }
		u64 end = c->log_end < logged ? c->log_end : logged, n = end > c->at ? end - c->at : 0;
		if (!n && c->at >= c->log_end && c->follows) { frame(c->client, STDERR, c->id, "\1", 1); c->follows = 0; c->log_end = ~0UL; continue; }
		if (!n && c->at < c->log_end && !over) return;
		if (!n) { frame_number(c->client, EXITED, c->id, 0); c->said = 1; c->log_end = c->client->said; break; }
		if (n > PIECE) n = PIECE;
		if ((long)n > c->credit) n = c->credit;
		if (!n) return;
		pull(log_ring, c->at, data, n);
		frame(c->client, STDOUT, c->id, data, n);
		c->at += n; c->credit -= n;
	}
	if (!c->client || c->deaf || (c->said && c->client->arrived >= c->log_end)) c->used = 0;
}

/* Pass output on as far as credit and room go. True when nothing is left to read for now. */
static int drain(struct command *c, int *fd, u8 kind)
{
	static u8 data[PIECE];
	if (log_ring && main_command == c - commands) return drain_main(c, fd, kind);
	for (int rounds = 0; *fd >= 0; rounds++) {
		long most = c->deaf || c->credit > PIECE ? PIECE : c->credit;
		if (c->settling && most > c->rest[kind - 1]) most = c->rest[kind - 1];
		if (c->settling && !c->rest[kind - 1]) return 1;
		if (most <= 0 || (rounds == 8 && (!c->exited || c->left)) || (!c->deaf && room(c->client) < RESERVE + PIECE + 9)) return 0;
		long n = K(read, *fd, data, most);
		if (n == -EINTR) continue;
		if (n == -EAGAIN) return 1;
		if (n < 0 && c->terminal && !c->exited) { c->hung = now_ms() + HUNG_MS; return 1; } /* nobody holds it now: closed, it would kill the command */
		if (n <= 0) { shut(fd); return 1; }
		if (c->deaf) { if (rounds < 64) continue; return 1; }
		c->credit -= n;
		c->rest[kind - 1] -= c->settling ? n : 0;
		frame(c->client, kind, c->id, data, n);
	}
	return 1;
}

static void release(struct command *c)
{
	if (!c->said || (c->ending && !c->ended)) return;
	shut(&c->in); shut(&c->out); shut(&c->err); shut(&c->status);
	if (c->input) K(madvise, c->input, WINDOW, 4); /* not needed */
	c->used = 0;
}

/* It is over when its streams have ended. Where a background job holds them, the client is told and says how long
 * it still listens: then what is there is read, and no more. */
static void settle(struct command *c)
{
	if (!c->exited || c->said) return;
	if (!(drain(c, &c->out, STDOUT) & drain(c, &c->err, STDERR))) return;
	int held = c->out >= 0 || c->err >= 0;
	if (held && c->client && !c->deaf && !c->call && !c->settling) {
		if (!c->left && room(c->client) >= RESERVE) { frame_number(c->client, LEFT, c->id, c->code); c->left = 1; }
		return;
	}
	shut(&c->in); shut(&c->out); shut(&c->err);
	frame_number(c->client, EXITED, c->id, c->code | held << 8);
	c->said = 1;
	if (main_command == c - commands) {
		if (!log_ring) leave(c->code);
		over = now_ms();
		last_code = c->code;
		main_command = -1;
	}
	release(c);
}

static void send_to(int child, int which) { if (K(kill, -child, which) < 0) K(kill, child, which); }

/* What the keeper noted: the child's number, how it ended, or why it did not start. */
static void read_status(struct command *c)
{
	u8 data[5];
	u32 value;
	while (c->status >= 0) {
		long n = K(read, c->status, data, 5);
		if (n == -EINTR) continue;
		if (n == -EAGAIN) break;
		if (n != 5) { /* the keeper is gone; without a word if somebody killed it */
			shut(&c->status);
			if (!c->exited) { c->exited = 1; c->code = 137; }
			break;
		}
		memcpy(&value, data + 1, 4);
		if (data[0] == 'P') {
			c->child = value;
			for (int i = 0; i < 8 && c->signals[i]; i++) send_to(c->child, c->signals[i]);
		} else if (data[0] == 'E') {
			c->exited = 1; c->code = value;
		} else if (data[0] == 'R' && !c->said) {
			frame_number(c->client, REFUSED, c->id, value);
			c->said = c->exited = 1;
		}
	}
	settle(c);
	if (c->said) release(c);
}

static void send_signal(struct command *c, u32 which)
{
	if (which < 1 || which > 64) return;
	if (c->call) return;
	read_status(c); /* its number is not given away before it says that it is over */
	if (!c->used || c->exited) return;
	if (c->child > 1) { send_to(c->child, which); return; }
	for (int i = 0; i < 8; i++) if (!c->signals[i]) { c->signals[i] = which; return; }
}

static void begin_end(struct command *c, u32 grace)
{
	if (c->call) { if (!c->exited) K(kill, c->pid, SIGKILL); grace = 0; }
	c->ending = 1; c->ended = 0;
	c->end_from = c->end_next = now_ms();
	c->end_grace = grace;
	c->end_pause = 1;
	if (grace && (!c->keeper_gone || c->mark) && !c->call) each_under(c->keeper_gone ? -1 : c->pid, c->mark, SIGTERM, SIGCONT);
}

/* One step of ending a whole tree. It is over when the keeper has nothing left and has gone: the kernel
 * says so, which no list of processes can. It takes no new process, so none has to be free. */
static void step_end(struct command *c, long now)
{
	if (!c->ending || c->ended || now < c->end_next) return;
	int over = now - c->end_from >= c->end_grace;
	if (!c->keeper_gone && !c->call) {
		K(kill, c->pid, SIGCONT); /* somebody may have stopped it */
		c->living = over ? each_under(c->pid, c->mark, SIGSTOP, SIGKILL) : 1;
		if (over && !c->living && now - c->end_from > c->end_grace + 3000) K(kill, c->pid, SIGKILL); /* stopped again and again */
	} else if (c->mark && !c->call) {
		c->living = each_under(-1, c->mark, over ? SIGSTOP : 0, over ? SIGKILL : 0);
	}
	if (c->keeper_gone && !strays_next && !(c->mark && c->living)) {
		c->ended = 1;
		frame_number(c->client, ENDED, c->id, strays_left);
	} else if (over && now - c->end_from > c->end_grace + END_MS) {
		c->ended = 1;
		frame_number(c->client, ENDED, c->id, c->living > 0 ? c->living : 1);
		c->ending = 0;
	}
	c->end_next = now + c->end_pause;
	if (c->end_pause < 50) c->end_pause *= 2;
	if (c->ended) release(c);
}

/* Somebody killed a keeper: what was under it has fallen to us. It ends now, all of it. */
static void step_strays(long now)
{
	static int clean;
	if (!strays_next || now < strays_next) return;
	strays_left = each_under(0, 0, SIGSTOP, SIGKILL);
	clean = strays_left ? 0 : clean + 1;
	strays_next = now + 5;
	if (clean >= 3 || now - strays_from > END_MS) { strays_next = 0; clean = 0; }
}

static void reap(void)
{
	int status;
	long pid;
	while ((pid = K(wait4, -1, &status, WNOHANG | WUNTRACED, 0)) > 0) {
		if ((status & 0xff) == 0x7f) { if (is_keeper(pid)) K(kill, pid, SIGCONT); continue; } /* stopped: nobody would hear how it ends */
		if (!forget_keeper(pid)) continue;
		int murdered = status & 0x7f, call = 0;
		for (int i = 0; i < COMMANDS; i++) {
			struct command *c = &commands[i];
			if (!c->used || c->pid != pid || c->keeper_gone) continue;
			c->keeper_gone = 1;
			call = c->call;
			if (c->call) { c->exited = 1; c->code = exit_code(status); settle(c); }
			else read_status(c);
			c->end_next = 0;
		}
		if (murdered && !call) strays_next = strays_from = now_ms();
	}
}

/* -- what clients ask --------------------------------------------------------------------------------- */

static void take(struct client *from, u8 *data, u32 n)
{
	u32 id, value = 0;
	u8 kind = data[0];
	memcpy(&id, data + 1, 4);
	data += 5; n -= 5;
	if (n >= 4) memcpy(&value, data, 4);
	if (kind == START) {
		if (n < 12) frame_number(from, REFUSED, id, EINVAL); else start(from, id, data, n);
		return;
	}
	if (kind == RENEW) {
		long until = now_ms() + (long)value * 1000;
		if (as_init && value) deadline = cap && until > cap ? cap : until;
		frame_number(from, RENEWED, id, as_init && value ? (deadline - now_ms() + 999) / 1000 : 0);
		return;
	}
	if (kind == BYE) { free_client(from); return; }
	struct command *c = find_command(from, id);
	if (kind == LOG) {
		for (int i = 0; i < most_commands && !c; i++) if (!commands[i].used) {
			commands[i] = (struct command){.used = 1, .reader = 1, .call = 1, .client = from, .id = id, .pid = -1, .in = -1, .out = -1, .err = -1,
				.status = -1, .credit = REPLAY, .input = commands[i].input, .log_end = logged, .follows = value != 0};
			frame_number(from, STARTED, id, 0);
			return;
		}
		frame_number(from, REFUSED, id, EAGAIN);
		return;
	}
	if (c && c->reader && kind == END) { c->log_end = c->at; c->follows = 0; c = 0; }
	if (!c) {
		if (kind == END) frame_number(from, ENDED, id, 0);
		return;
	}
	if (kind == CREDIT) {
		c->credit = c->credit + value > 1L << 40 ? 1L << 40 : c->credit + value;
		settle(c);
	} else if (kind == INPUT && c->in >= 0 && !c->input_over) {
		if (c->from && c->to + n > WINDOW) { memmove(c->input, c->input + c->from, c->to - c->from); c->to -= c->from; c->from = 0; }
		if (n > WINDOW || c->to + n > WINDOW) { shut(&c->in); frame(from, INPUT_BROKEN, id, 0, 0); return; } /* more than agreed */
		memcpy(c->input + c->to, data, n);
		c->to += n;
		feed(c);
	} else if (kind == INPUT_END && !c->input_over) {
		c->input_over = 1;
		feed(c);
	} else if (kind == SIGNAL) {
		send_signal(c, value);
	} else if (kind == RESIZE && c->terminal && c->out >= 0) {
		u16 size[4] = {value & 0xffff, value >> 16, 0, 0};
		K(ioctl, c->out, TIOCSWINSZ, size);
	} else if (kind == FORGET) {
		c->deaf = 1;
		settle(c);
	} else if (kind == SETTLE && c->left && !c->settling) {
		c->settling = 1;
		c->rest[0] = c->rest[1] = PIECE; /* of a terminal, which does not say how much there is */
		if (!c->terminal && c->out >= 0) K(ioctl, c->out, FIONREAD, &c->rest[0]);
		if (!c->terminal && c->err >= 0) K(ioctl, c->err, FIONREAD, &c->rest[1]);
		settle(c);
	} else if (kind == END) {
		begin_end(c, value);
	}
}

/* The frames that have come as a whole, while there is room to answer them. */
static void process(struct client *c)
{
	u32 at = 0, size;
	while (c->used && c->filled - at >= 4 && room(c) >= RESERVE) {
		memcpy(&size, c->stream + at, 4);
		if (size < 5 || size > FRAME - 4) { free_client(c); return; }
		if (c->filled - at - 4 < size) break;
		take(c, c->stream + at + 4, size);
		at += 4 + size;
	}
	if (!c->used) return;
	memmove(c->stream, c->stream + at, c->filled - at);
	c->filled -= at;
}

static struct client *packet(struct client *c, u8 *data, u32 n)
{
	u64 offset, arrived;
	memcpy(&offset, data, 8);
	memcpy(&arrived, data + 8, 8);
	data += 16; n -= 16;
	if (!c->known) return greeted(c, data, n);
	if (arrived > c->said || offset > c->stored || n > FRAME || offset + n > c->stored + FRAME + WIRE - c->filled) { free_client(c); return 0; }
	c->since = now_ms();
	if (arrived > c->arrived) c->arrived = arrived;
	if (c->sent < c->arrived) c->sent = c->arrived;
	u64 had = c->stored - offset; /* of it, from before the channel dropped */
	if (had < n) {
		memcpy(c->stream + c->filled, data + had, n - had);
		c->filled += n - had;
		c->stored += n - had;
	}
	process(c);
	return c->used ? c : 0;
}

static int value_of(u8 c)
{
	return c >= 'A' && c <= 'Z' ? c - 'A' : c >= 'a' && c <= 'z' ? c - 'a' + 26 : digit(c) ? c - '0' + 52 : c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* A line of base64, in place. How many bytes, or -1. */
static int decode(u8 *line, u32 n)
{
	u32 have = 0, bits = 0, value = 0;
	while (n && (line[n - 1] == '=' || line[n - 1] == '\r')) n--;
	for (u32 i = 0; i < n; i++) {
		int v = value_of(line[i]);
		if (v < 0) return -1;
		value = value << 6 | v; bits += 6;
		if (bits >= 8) line[have++] = value >> (bits -= 8);
	}
	return have;
}

static void receive(struct client *c)
{
	u32 most = WIRE - c->wire_filled;
	if (c->ahead && c->ahead < most) most = c->ahead;
	long got = K(read, c->ahead ? c->link : c->in, c->wire + c->wire_filled, most);
	if (got == -EINTR || got == -EAGAIN) return;
	if (got == 0 && c->once && c->known) { shut(&c->in); return; }
	if (got <= 0) { unplug(c); return; }
	if (c->ahead) c->ahead -= got;
	c->wire_filled += got;
	u32 at = 0, size;
	while (c && c->used && c->in >= 0) { /* a greeting may move it, with its wire, to the client that comes again */
		u8 *wire = c->wire;
		if (c->text) {
			u32 end = at;
			while (end < c->wire_filled && wire[end] != '\n') end++;
			if (end == c->wire_filled) break;
			u8 *line = wire + at + 1;
			int n = wire[at] == '~' ? decode(line, end - at - 1) : 0;
			at = end + 1;
			if (n == 0) continue;
			if (n >= HEAD) memcpy(&size, line, 4);
			if (n < HEAD || size != (u32)n - 4) { unplug(c); return; }
			c = packet(c, line + 4, size);
		} else {
			if (c->wire_filled - at < 4) break;
			memcpy(&size, wire + at, 4);
			if (size < HEAD - 4 || size > PACKET + HEAD) { unplug(c); return; }
			if (c->wire_filled - at - 4 < size) break;
			at += 4 + size;
			c = packet(c, wire + at - size, size);
		}
	}
	if (!c || !c->used || c->in < 0) return;
	if (at == 0 && c->wire_filled == WIRE) { unplug(c); return; } /* longer than any packet */
	memmove(c->wire, c->wire + at, c->wire_filled - at);
	c->wire_filled -= at;
}

/* -- the server ----------------------------------------------------------------------------------------- */

struct address { u16 family; char path[108]; };
struct vector { void *base; u64 size; };
struct message { void *name; u32 name_size; struct vector *vectors; u64 vector_count; void *control; u64 control_size; int flags; };
struct rights { u64 size; int level, type, fds[2]; };

static int name_socket(struct address *a, const char *name)
{
	memset(a, 0, sizeof *a);
	a->family = 1;
	u64 n = length(name);
	if (n > 60) n = 60;
	memcpy(a->path + 1, "lowtide-", 8);
	memcpy(a->path + 9, name, n);
	return 2 + 9 + n;
}

static long accept_next; /* no descriptor was free for a channel: when to try again. It waits at the listener meanwhile */

static void welcome(int listener)
{
	long fd = K(accept4, listener, 0, 0, O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 && fd != -EAGAIN && fd != -EINTR && fd != -ECONNABORTED) accept_next = now_ms() + BLIND_MS;
	if (fd < 0) return;
	struct { int pid; u32 uid, gid; } peer = {0, 0, 0};
	u32 size = sizeof peer;
	int parent = -1, known = K(getsockopt, fd, 1, 17, &peer, &size) >= 0;
	/* Whoever came in through the engine has no parent in here. What runs in here always has one. Elsewhere a channel comes
	 * from our own user: another one could keep us waiting, at a pipe of his that we are to write to. */
	if (K(getpid) == 1) known = known && look(peer.pid, &parent) && parent == 0;
	else if (!as_init || guarded) known = known && (!peer.uid || peer.uid == (u32)K(getuid));
	if (!known) { K(close, fd); return; }
	struct client *c = new_client();
	if (!c) { K(close, fd); return; }
	c->link = fd;
}

/* The two descriptors of a channel, from the one that was told to hand them over. */
static void plug(struct client *c)
{
	u8 said[5] = {0};
	struct vector vector = {said, 5};
	struct rights rights = {0, 0, 0, {-1, -1}};
	struct message message = {0, 0, &vector, 1, &rights, sizeof rights, 0};
	long n = K(recvmsg, c->link, &message, 0x40000040); /* close on exec, do not wait */
	if (n == -EAGAIN || n == -EINTR) return;
	if (c->in >= 0 || n != 5 || rights.size < sizeof rights || rights.level != 1 || rights.type != 1) {
		if (n > 0 && rights.level == 1 && rights.size >= 20) K(close, rights.fds[0]);
		if (n > 0 && rights.level == 1 && rights.size >= 24) K(close, rights.fds[1]);
		unplug(c); /* it was killed, and the engine waits for the streams to end */
		return;
	}
	c->in = rights.fds[0]; c->out = rights.fds[1];
	c->text = said[0] != 'b';
	c->once = said[0] == 'o' ? now_ms() + ONCE_MS : 0;
	memcpy(&c->ahead, said + 1, 4);
	K(fcntl, c->in, F_SETFL, O_RDWR | O_NONBLOCK);
	K(fcntl, c->out, F_SETFL, O_RDWR | O_NONBLOCK);
}

/* Whether a channel whose input has ended has said all that it can: its commands have, or one wants input or is to be settled. */
static int answered(struct client *c, long now)
{
	if (!c->once || !c->known || c->in >= 0 || c->out < 0) return 0;
	if (now >= c->once) return 1;
	int living = 0, waiting = 0;
	for (int i = 0; i < COMMANDS; i++)
		if (commands[i].used && commands[i].client == c && !commands[i].said) living = 1, waiting |= commands[i].in >= 0 || commands[i].left;
	return (waiting || !living) && !c->filled && c->said == c->sent && c->from == c->to;
}

/* `ppoll` takes no more descriptors than may be open, and a root in the sandbox may lower that limit for us, for good. Then
 * all of them are tried every BLIND_MS, which none of them blocks: as slow as that, and never as busy as a loop that does
 * not wait. */
static void wait_for(struct pollfd *w, int n, long left)
{
	struct { long sec, nsec; } t = {left / 1000, left % 1000 * 1000000};
	if (K(ppoll, w, n, left < 0 ? 0 : (void *)&t, 0, 0) != -EINVAL) return;
	if (left < 0 || left > BLIND_MS) left = BLIND_MS;
	t.sec = 0; t.nsec = left * 1000000;
	K(ppoll, 0, 0, &t, 0, 0);
	for (int i = 0; i < n; i++) w[i].revents = w[i].fd >= 0 ? w[i].events : 0;
}

static void sooner(long *wake, long at) { if (!*wake || at < *wake) *wake = at; }

static __attribute__((noreturn)) void serve(int listener)
{
	static struct pollfd w[2 + 3 * CLIENTS + 4 * COMMANDS];
	u64 wanted = as_init ? ~0UL : 1UL << (SIGCHLD - 1);
	int ending = 0;
	long signals = K(signalfd4, -1, &wanted, 8, O_CLOEXEC | O_NONBLOCK), idle_from = 0;
	if (signals < 0) leave(1);
	for (;;) {
		int n = 2, busy = 0, present = 0;
		long wake = deadline, now = now_ms();
		if (deadline && now >= deadline) { say_if_heard(2, "lowtide: the sandbox's lifetime is over\n"); leave(EXPIRED); }
		int readers = 0;
		for (int i = 0; i < COMMANDS; i++) if (commands[i].used && commands[i].reader) { tell_log(&commands[i]); readers |= commands[i].used; }
		if (over && (!readers || now - over > LAST_MS)) leave(last_code);
		if (over) sooner(&wake, over + LAST_MS + 1);
		w[0] = (struct pollfd){.fd = signals, .events = POLLIN};
		if (accept_next && now >= accept_next) accept_next = 0;
		if (accept_next) sooner(&wake, accept_next);
		w[1] = (struct pollfd){.fd = accept_next ? -1 : listener, .events = POLLIN};
		for (int i = 0; i < CLIENTS; i++) {
			struct client *c = &clients[i];
			if (c->used && c->known && c->in < 0 && now - c->since > BOUND_MS) free_client(c);
			if (c->used && !c->known && now - c->since > GREETING_MS) unplug(c);
			/* Some services let a program go on that nobody listens to, and do not tell it: commands must not wait for ever. */
			int full = c->used && c->known && c->in >= 0 && room(c) < RESERVE + PIECE + 9;
			if (full && now - c->since > BOUND_MS) { free_client(c); full = 0; }
			if (c->used && c->known && c->filled) process(c);
			if (c->used) transmit(c);
			if (c->used && answered(c, now)) unplug(c);
			if (c->used && c->once && c->in < 0 && c->out >= 0) sooner(&wake, c->once);
			present |= c->used;
			if (c->used && c->known && c->in < 0) sooner(&wake, c->since + BOUND_MS + 1);
			if (full) sooner(&wake, c->since + BOUND_MS + 1);
			if (c->used && !c->known) sooner(&wake, c->since + GREETING_MS + 1);
			w[n++] = (struct pollfd){.fd = c->used ? c->link : -1, .events = POLLIN};
			w[n++] = (struct pollfd){.fd = c->used && !c->ahead ? c->in : -1, .events = POLLIN};
			w[n++] = (struct pollfd){.fd = c->used && c->from < c->to ? c->out : -1, .events = POLLOUT};
		}
		for (int i = 0; i < COMMANDS; i++) {
			struct command *c = &commands[i];
			if (!c->used) continue;
			busy = 1;
			int hung = c->hung > now && !c->exited;
			if (hung) sooner(&wake, c->hung);
			int more = !hung && (c->deaf || (c->credit > 0 && c->client && room(c->client) >= RESERVE + PIECE + 9));
			if (c->exited && !c->said && more) { settle(c); if (!c->used) { i--; continue; } }
			if (c->ending && !c->ended) sooner(&wake, c->end_next);
			int inputs = c->in >= 0 && c->from < c->to && (!c->client || room(c->client) >= RESERVE);
			w[n++] = (struct pollfd){.fd = inputs ? c->in : -1, .events = POLLOUT};
			int own = log_ring && main_command == i; /* then `rest` says which of our own streams is waited for */
			if (own && c->exited) sooner(&wake, now + LAST_MS + 1);
			w[n++] = own && c->rest[0] ? (struct pollfd){.fd = 1, .events = POLLOUT} : (struct pollfd){.fd = more && !c->settling ? c->out : -1, .events = POLLIN};
			w[n++] = own && c->rest[1] ? (struct pollfd){.fd = 2, .events = POLLOUT} : (struct pollfd){.fd = more && !c->settling ? c->err : -1, .events = POLLIN};
			w[n++] = (struct pollfd){.fd = c->status, .events = POLLIN};
		}
		if (!as_init && !busy && !present) { /* nobody and nothing: the next one starts another */
			if (!idle_from) idle_from = now;
			if (now - idle_from > GREETING_MS) leave(0);
			sooner(&wake, idle_from + GREETING_MS + 1);
		} else {
			idle_from = 0;
		}
		if (strays_next) sooner(&wake, strays_next);
		if (ending) sooner(&wake, now + 10); /* what came in through the engine is no child of ours: look whether any is left */
		long left = wake ? wake - now : -1;
		if (wake && left < 0) left = 0;
		wait_for(w, n, left);

		int at = 2 + 3 * CLIENTS;
		for (int i = 0; i < COMMANDS && at < n; i++) {
			struct command *c = &commands[i];
			if (!c->used) continue;
			if (w[at].revents) feed(c);
			if (w[at + 1].revents) drain(c, &c->out, STDOUT);
			if (w[at + 2].revents) drain(c, &c->err, STDERR);
			if (w[at + 3].revents) read_status(c);
			at += 4;
		}
		u8 info[128];
		while (K(read, signals, info, sizeof info) == sizeof info) {
			u32 which = *(u32 *)info, sender = *(u32 *)(info + 12);
			if (which == SIGCHLD || !as_init || (K(getpid) == 1 && sender)) continue; /* only the engine may tell us anything */
			if (main_command >= 0) send_signal(&commands[main_command], which);
			else if (which == SIGTERM || which == SIGINT || which == SIGQUIT) {
				if (over) leave(last_code); /* only readers of its log are waited for */
				ending = 1;
				K(kill, -1, SIGTERM);
				K(kill, -1, SIGCONT);
			}
		}
		reap();
		now = now_ms();
		step_strays(now);
		for (int i = 0; i < COMMANDS; i++) if (commands[i].used) step_end(&commands[i], now);
		if (ending && K(kill, -1, 0) == -ESRCH) leave(0);
		for (int i = 0; i < CLIENTS; i++) {
			struct client *c = &clients[i];
			if (c->used && w[2 + 3 * i + 2].revents) transmit(c);
			if (c->used && w[2 + 3 * i + 1].revents && c->in >= 0) receive(c);
			if (c->used && w[2 + 3 * i].revents && c->link >= 0) { if (c->ahead) receive(c); else plug(c); }
		}
		if (w[1].revents) welcome(listener);
	}
}

static int listen_as(const char *name)
{
	struct address a;
	int n = name_socket(&a, name);
	long fd = K(socket, 1, 1 | O_CLOEXEC | O_NONBLOCK, 0), error = fd < 0 ? fd : K(bind, fd, &a, n);
	if (error >= 0) error = K(listen, fd, 64);
	if (error < 0) { if (fd >= 0) K(close, fd); return error; }
	return fd;
}

static void prepare(void)
{
	K(getrandom, proof, 16, 0);
	block_signals(1);
	int takes = 0; /* gVisor's process 1 is told that it may, and nobody else is */
	K(prctl, PR_SET_CHILD_SUBREAPER, 1);
	orphans_are_ours = K(prctl, PR_GET_CHILD_SUBREAPER, &takes) < 0 || !takes;
	K(prlimit64, 0, RLIMIT_NOFILE, 0, files_before);
	u64 files[2] = {files_before[1] < FILES(COMMANDS) ? files_before[1] : FILES(COMMANDS), files_before[1]};
	if (files[0] < files_before[0] || K(prlimit64, 0, RLIMIT_NOFILE, files, 0) < 0) files[0] = files_before[0];
	if (files[0] < FILES(COMMANDS)) most_commands = files[0] > FILES(1) ? (files[0] - FILES(0)) / 4 : 1;
}

/* `patience`: for so many ms a server that does not answer yet is waited for: it is only just starting. */
static __attribute__((noreturn)) void hand_over(const char *name, u8 mode, char *first, long patience)
{
	u8 said[5] = {mode};
	u32 size = first ? length(first) : 0;
	int ahead = decode((u8 *)first, size);
	memcpy(said + 1, &ahead, 4);
	struct address a;
	int n = name_socket(&a, name);
	long fd = K(socket, 1, 1 | O_CLOEXEC, 0), error = fd < 0 ? fd : K(connect, fd, &a, n), until = now_ms() + patience;
	while (error == -ECONNREFUSED && now_ms() < until) {
		struct { long sec, nsec; } t = {0, 2000000};
		K(ppoll, 0, 0, &t, 0, 0);
		error = K(connect, fd, &a, n);
	}
	struct vector vector = {said, 5};
	struct rights rights = {sizeof rights, 1, 1, {0, 1}};
	struct message message = {0, 0, &vector, 1, &rights, sizeof rights, 0};
	if (error >= 0) error = ahead < 0 ? -EINVAL : K(sendmsg, fd, &message, 0);
	if (error >= 0) error = write_all(fd, first, ahead);
	if (first) memset(first, 0, size); /* it holds the key */
	if (error < 0) { say(2, "lowtide: no server answers here\n"); leave(1); }
	K(close, 0); K(close, 1);
	while (K(read, fd, &mode, 1) == -EINTR) {} /* until the server lets go of the channel */
	leave(0);
}

/* The value of a variable, which is taken out of the environment before anything can inherit it; 0: there is none. */
static char *taken_out(const char *name)
{
	char **to = environment, *found = 0;
	for (char **e = environment; *e; e++)
		if (begins(*e, name)) found = *e + length(name); else *to++ = *e;
	*to = 0;
	return found;
}

static void take_key(void)
{
	char *v = taken_out("LOWTIDE_KEY=");
	if (!v) return;
	have_key = length(v) == 32;
	for (int i = 0; have_key && i < 32; i++)
		key[i / 2] = key[i / 2] << 4 | (digit(v[i]) ? v[i] - '0' : (v[i] | 32) - 'a' + 10);
	memset(v, 0, length(v));
}

/* The server of `init`, by its pid namespace: abstract names are the network's, and sandboxes may share that.
 * gVisor has no such numbers (it makes one up for each look), and a network of its own for each sandbox. */
static const char *own_name(void)
{
	static char name[64] = "inside-";
	long n = K(readlinkat, AT_CWD, "/proc/self/ns/pid", name + 7, sizeof name - 8);
	if (n < (long)sizeof "pid:[4026531836]" - 1) name[6] = 0;
	return name;
}

static __attribute__((noreturn)) void init(int argc, char **argv)
{
	static u8 request[FRAME];
	long seconds = number(argv[0]), most = number(argv[1]);
	u16 count = argc - 2;
	take_key();
	prepare();
	as_init = 1;
	if (most) cap = now_ms() + most * 1000;
	deadline = seconds ? now_ms() + seconds * 1000 : cap;
	if (cap && deadline > cap) deadline = cap;
	int listener = listen_as(own_name());
	if (listener < 0 && K(getpid) == 1) { say(2, "lowtide: the program inside cannot listen: its name is taken\n"); leave(126); }
	if (count) {
		u8 *p = request + 11;
		memcpy(request + 5, &count, 2);
		for (int i = 0; i < count; i++) {
			u64 n = length(argv[2 + i]) + 1;
			if (p + n > request + FRAME) leave(126);
			memcpy(p, argv[2 + i], n);
			p += n;
		}
		struct command *c = start(0, 0, request, p - request);
		if (!c) leave(126);
		c->deaf = 1;
		main_command = c - commands;
	}
	serve(listener);
}

static int run(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	environment = argv + argc + 1;
	K(prctl, PR_SET_DUMPABLE, 0);
	guarded = same(what, "guard");
	if (guarded && argc > 4 && same(argv[2], "log")) { if (!(log_ring = pages(REPLAY))) leave(126); argc--; argv++; }
	if ((guarded || same(what, "init")) && argc > 3) init(argc - 2, argv + 2);
	if (same(what, "attach")) {
		char *first = taken_out("LOWTIDE_FIRST=");
		u8 mode = 'b';
		long patience = 0;
		for (int i = 2; i < argc; i++)
			if (same(argv[i], "wait")) patience = GREETING_MS;
			else mode = 't';
		hand_over(own_name(), mode, first, patience);
	}
	if (same(what, "serve") && argc > 2) {
		char *first = taken_out("LOWTIDE_FIRST=");
		u8 mode = 'b';
		for (int i = 3; i < argc; i++) {
			if (same(argv[i], "own")) K(unlinkat, AT_CWD, argv[0], 0);
			if (same(argv[i], "once")) mode = 'o';
			if (same(argv[i], "text") && mode == 'b') mode = 't';
		}
		int listener = listen_as(argv[2]);
		if (listener >= 0 && K(clone, SIGCHLD) == 0) {
			K(setsid);
			long null = K(openat, AT_CWD, "/dev/null", O_RDWR);
			for (int fd = 0; fd < 3 && null >= 0; fd++) if (fd != null) K(dup3, null, fd, 0);
			if (null > 2) K(close, null);
			prepare();
			serve(listener);
		}
		shut(&listener);
		hand_over(argv[2], mode, first, 0);
	}
	say(2, "lowtide: not meant to be run by hand\n");
	return 2;
}

#if defined(HOSTED)
int main(int argc, char **argv) { return run(argc, argv); }
#else
__attribute__((used)) void begin(long *stack) { leave(run((int)stack[0], (char **)(stack + 1))); }
#endif
