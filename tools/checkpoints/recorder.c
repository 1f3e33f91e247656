/* Records the operations of a process on the files below one folder, in order, and makes chosen ones fail.

   Loaded with LD_PRELOAD. Each operation is carried out and appended to the log while all processes of the job are
   locked out, so the order of the log is the order on the disk. See recorder.py for the log's format. What is not
   recorded (memory maps, io_uring, direct system calls) shows when the log is replayed: the result is not the folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FILES 65536

static char root[PATH_MAX];
static size_t root_length;
static int log_file = -1, lock_file = -1;
static pid_t owner;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char is_recorded[MOST_FILES]; /* by file descriptor: whether it is open below the root */
static long count, fail_at = -1;
static int fail_errno, is_full;

#define REAL(name) static __typeof__(&name) real_##name; if (!real_##name) real_##name = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static ssize_t real_write_all(int file, const void *bytes, size_t size) {
  REAL(write);
  size_t done = 0;
  while (done < size) {
    ssize_t written = real_write(file, (const char *)bytes + done, size - done);
    if (written <= 0) abort();
    done += written;
  }
  return done;
}

/* -------------------------------------------------------------------------------------- for the recorded process */

int recorder_start(const char *folder, const char *log) {
  REAL(open);
  if (!realpath(folder, root)) return -1;
  root_length = strlen(root);
  log_file = real_open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  lock_file = real_open(log, O_RDONLY | O_CLOEXEC);
  owner = getpid();
  return log_file < 0 || lock_file < 0 ? -1 : 0;
}

/* The operation with this number, counted from now on, fails; -1 for none. ENOSPC: so does all that needs space later. */
void recorder_fail(long at, int error) { count = 0; fail_at = at; fail_errno = error; is_full = 0; }

long recorder_count(void) { return count; }

static void lock(void) {
  pthread_mutex_lock(&mutex);
  while (flock(lock_file, LOCK_EX) && errno == EINTR) {}
}

static void unlock(void) {
  int kept = errno;
  flock(lock_file, LOCK_UN);
  pthread_mutex_unlock(&mutex);
  errno = kept;
}

/* kind, inode, offset or length, path, second path, bytes */
static void note(char kind, ino_t inode, long long at, const char *path, const char *second, const void *bytes,
                 size_t size) {
  int kept = errno;
  char line[2 * PATH_MAX + 128];
  int length = snprintf(line, sizeof line, "%c\t%llu\t%lld\t%s\t%s\t%zu\n", kind, (unsigned long long)inode, at,
                        path ? path : "", second ? second : "", size);
  real_write_all(log_file, line, length);
  if (size) real_write_all(log_file, bytes, size);
  errno = kept;
}

void recorder_mark(const char *text) {
  if (log_file < 0) return;
  lock();
  note('M', 0, 0, text, NULL, NULL, 0);
  unlock();
}

/* ----------------------------------------------------------------------------------------------------- inside */

/* The path below the root in `found`, without links in its folder; 0 where it is elsewhere. */
static int below_root(int folder, const char *path, char *found) {
  char whole[PATH_MAX], parent[PATH_MAX];
  if (log_file < 0 || owner != getpid()) return 0;
  if (path[0] == '/') {
    if (snprintf(whole, sizeof whole, "%s", path) >= (int)sizeof whole) return 0;
  } else {
    char base[PATH_MAX], link[64];
    if (folder == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return 0;
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      ssize_t length = readlink(link, base, sizeof base - 1);
      if (length < 0) return 0;
      base[length] = 0;
    }
    if (snprintf(whole, sizeof whole, "%s/%s", base, path) >= (int)sizeof whole) return 0;
  }
  size_t length = strlen(whole);
  while (length > 1 && whole[length - 1] == '/') whole[--length] = 0;
  char *name = strrchr(whole, '/');
  if (!name) return 0;
  *name++ = 0;
  if (!strcmp(name, ".") || !strcmp(name, "..")) { name[-1] = '/'; name = ""; }
  if (!realpath(whole[0] ? whole : "/", parent)) return 0;
  if (snprintf(found, PATH_MAX, *name ? "%s/%s" : "%s%s", parent, name) >= PATH_MAX) return 0;
  return !strncmp(found, root, root_length) && (found[root_length] == '/' || !found[root_length]);
}

static int is_below_root(int file) {
  return log_file >= 0 && owner == getpid() && file >= 0 && file < MOST_FILES && is_recorded[file];
}

/* Whether the next operation is to fail, with errno set. */
static int fails(int needs_space) {
  long number = count++;
  if (number == fail_at) {
    if (fail_errno == ENOSPC) {
      is_full = 1;
      if (!needs_space) return 0;
    }
    errno = fail_errno;
    return 1;
  }
  if (is_full && needs_space) { errno = ENOSPC; return 1; }
  return 0;
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
  REAL(openat);
  char found[PATH_MAX];
  if (!below_root(folder, path, found)) {
    int file = real_openat(folder, path, flags, mode);
    if (file >= 0 && file < MOST_FILES) is_recorded[file] = 0;
    return file;
  }
  lock();
  struct stat about;
  int is_new = (flags & O_CREAT) && lstat(found, &about) && errno == ENOENT;
  int changes = is_new || (flags & O_TRUNC);
  if (changes && fails(is_new)) { unlock(); return -1; }
  int file = real_openat(folder, path, flags, mode);
  if (file >= 0) {
    if (file >= MOST_FILES) abort();
    is_recorded[file] = 1;
    fstat(file, &about);
    if (is_new) note('C', about.st_ino, 0, found, NULL, NULL, 0);
    else if (flags & O_TRUNC) note('L', about.st_ino, 0, NULL, NULL, NULL, 0);
  }
  unlock();
  return file;
}

#define MODE_OF(flags) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE_OF(flags) return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE_OF(flags) return opened(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int close(int file) {
  REAL(close);
  if (file >= 0 && file < MOST_FILES) is_recorded[file] = 0;
  return real_close(file);
}

static ssize_t written(int file, const void *bytes, size_t size, off_t at, int is_at) {
  REAL(write);
  REAL(pwrite);
  if (!is_below_root(file)) return is_at ? real_pwrite(file, bytes, size, at) : real_write(file, bytes, size);
  lock();
  if (fails(1)) {
    /* A disk that fills up takes a part first. */
    if (fail_errno != ENOSPC || count - 1 != fail_at || size < 2) { unlock(); return -1; }
    size /= 2;
  }
  ssize_t done = is_at ? real_pwrite(file, bytes, size, at) : real_write(file, bytes, size);
  if (done > 0) {
    struct stat about;
    fstat(file, &about);
    off_t start = is_at ? at : lseek(file, 0, SEEK_CUR) - done;
    note('W', about.st_ino, start, NULL, NULL, bytes, done);
  }
  unlock();
  return done;
}

ssize_t write(int file, const void *bytes, size_t size) { return written(file, bytes, size, 0, 0); }
ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) { return written(file, bytes, size, at, 1); }
ssize_t pwrite64(int file, const void *bytes, size_t size, off_t at) { return written(file, bytes, size, at, 1); }

ssize_t writev(int file, const struct iovec *parts, int number) {
  REAL(writev);
  if (!is_below_root(file)) return real_writev(file, parts, number);
  for (int i = 0; i < number; i++)
    if (parts[i].iov_len) return written(file, parts[i].iov_base, parts[i].iov_len, 0, 0); /* the first part of them */
  return 0;
}

static int resized(int file, off_t length) {
  REAL(ftruncate);
  if (!is_below_root(file)) return real_ftruncate(file, length);
  lock();
  int failed = fails(0) ? -1 : real_ftruncate(file, length);
  struct stat about;
  if (!failed && !fstat(file, &about)) note('L', about.st_ino, length, NULL, NULL, NULL, 0);
  unlock();
  return failed;
}

int ftruncate(int file, off_t length) { return resized(file, length); }
int ftruncate64(int file, off_t length) { return resized(file, length); }

static int synced(int file, int (*call)(int)) {
  if (!is_below_root(file)) return call(file);
  lock();
  int failed = fails(0) ? -1 : call(file);
  struct stat about;
  if (!failed && !fstat(file, &about)) note('F', about.st_ino, 0, NULL, NULL, NULL, 0);
  unlock();
  return failed;
}

int fsync(int file) { REAL(fsync); return synced(file, real_fsync); }
int fdatasync(int file) { REAL(fdatasync); return synced(file, real_fdatasync); }

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
  REAL(renameat2);
  char source[PATH_MAX], target[PATH_MAX];
  int is_source = below_root(from, old, source), is_target = below_root(to, new, target);
  if (!is_source && !is_target) return real_renameat2(from, old, to, new, flags);
  lock();
  int failed = fails(0) ? -1 : real_renameat2(from, old, to, new, flags);
  if (!failed) note(is_source && is_target && !(flags & RENAME_EXCHANGE) ? 'R' : '?', 0, 0, source, target, NULL, 0);
  unlock();
  return failed;
}

int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  return renamed(from, old, to, new, flags);
}

static int made(int folder, const char *path, mode_t mode) {
  REAL(mkdirat);
  char found[PATH_MAX];
  if (!below_root(folder, path, found)) return real_mkdirat(folder, path, mode);
  lock();
  int failed = fails(1) ? -1 : real_mkdirat(folder, path, mode);
  struct stat about;
  if (!failed && !lstat(found, &about)) note('K', about.st_ino, 0, found, NULL, NULL, 0);
  unlock();
  return failed;
}

int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return made(folder, path, mode); }

static int removed(int folder, const char *path, int flags) {
  REAL(unlinkat);
  char found[PATH_MAX];
  if (!below_root(folder, path, found)) return real_unlinkat(folder, path, flags);
  lock();
  int failed = fails(0) ? -1 : real_unlinkat(folder, path, flags);
  if (!failed) note('U', 0, 0, found, NULL, NULL, 0);
  unlock();
  return failed;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }

static int linked(int from, const char *old, int to, const char *new, int flags) {
  REAL(linkat);
  char found[PATH_MAX];
  if (!below_root(to, new, found)) return real_linkat(from, old, to, new, flags);
  lock();
  int failed = fails(1) ? -1 : real_linkat(from, old, to, new, flags);
  struct stat about;
  if (!failed && !lstat(found, &about)) note('H', about.st_ino, 0, found, NULL, NULL, 0);
  unlock();
  return failed;
}

int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return linked(from, old, to, new, flags); }
