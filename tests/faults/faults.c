/* A layer between a process and libc that sees every call which changes or forces a file of a store.

   Loaded by LD_PRELOAD into a child of the tests, armed by `faults_arm` (ctypes).  It numbers the calls on files below
   one directory, writes a log of them, and by request ends the process at one of them (SIGKILL, before or after it) or
   makes it fail.  With data the log says all that is surely on disk: the bytes of every range that was forced, at the
   time when forcing began, and every change of a directory.  Stores to mapped memory are no calls; they are seen where
   they are forced.  Where they are asked for (STORE, x86-64 alone) they count like calls, each instruction that writes to
   a mapping once, so that a process dies between any two of them.

   It never changes what a call does that it lets through, never allocates and takes no lock but one that is held for a
   few instructions, so it may be called from any thread.  Linux only. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#undef open
#undef open64
#undef openat
#undef openat64

/* The order is known to faults/__init__.py. */
enum name {
    CREATE, WRITE, PWRITE, FTRUNCATE, FALLOCATE, LINK, RENAME, UNLINK, MKDIR, RMDIR, MSYNC, FSYNC, FDATASYNC, OPEN, MMAP,
    PHOTO, /* no call: what is in a mapping now */
    STORE /* no call: an instruction that writes to a mapping */
};
enum action { NOTHING, KILL_BEFORE, KILL_AFTER, FAIL, SHORT_WRITE };
enum flag { IS_NEW = 1, IS_DIRECTORY = 2, LAST_LINK = 4 };

/* The header of each entry of the log; the two paths and the data follow. */
struct entry {
    uint32_t magic, name;
    uint64_t number; /* among the calls that are counted, from 1; 0 if this one is not */
    uint64_t begin, end; /* the clock when the call began and when it had returned */
    uint64_t inode, replaced; /* the file; the one that a rename took the name of */
    int64_t offset;
    uint64_t size;
    int32_t error; /* errno, 0 if it succeeded */
    uint32_t flags, path_size, second_size, data_size, unused;
};

static char root[PATH_MAX];
static size_t root_size;
static uint32_t counted_names;
static long fault_number;
static int action = NOTHING, fault_errno, fault_lasts, log_fd = -1, log_data;
static atomic_int armed, faults_on;
static atomic_long count, hits;
static atomic_ulong clock_now;

struct mapping {
    char *begin;
    size_t size;
    int writable;
    uint64_t inode;
    int64_t offset;
    char path[PATH_MAX];
};
/* A writer and a reader of one process may have 1024 queue files each, besides what has no limit. */
#define MAPPINGS 8192
static struct mapping mappings[MAPPINGS];
static int mapping_num;
static atomic_flag mapping_lock = ATOMIC_FLAG_INIT;

#define REAL(name) \
    static __typeof__(&name) real_##name; \
    if (!real_##name) real_##name = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void die(void)
{
    for (;;) {
        syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
        syscall(SYS_sched_yield);
    }
}

static int watches_stores(void);
static void watch_stores(void);

/* Arm the layer for files below `directory` (absolute, without links).  `names` is a set of bits by `enum name`: which
   calls are counted and take the action; the log has all.  `lasts`: the action holds for every call from `number` on. */
void faults_arm(const char *directory, uint32_t names, long number, int what, int error, int lasts, const char *log_path,
                int with_data)
{
    atomic_store(&armed, 0);
    if (log_fd >= 0) syscall(SYS_close, log_fd);
    log_fd = log_path ? (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    snprintf(root, sizeof root, "%s", directory);
    root_size = strlen(root);
    counted_names = names;
    fault_number = number;
    action = what;
    fault_errno = error;
    fault_lasts = lasts;
    log_data = with_data;
    atomic_store(&count, 0);
    atomic_store(&hits, 0);
    atomic_store(&faults_on, 1);
    if (watches_stores()) watch_stores();
    atomic_store(&armed, 1);
}

/* From now on no call fails; counting and logging go on. */
void faults_heal(void) { atomic_store(&faults_on, 0); }
long faults_count(void) { return atomic_load(&count); }
long faults_hits(void) { return atomic_load(&hits); }
/* A time after every log entry before this call. */
unsigned long faults_clock(void) { return atomic_fetch_add(&clock_now, 1) + 1; }
/* Go on where the clock of an earlier process stood, so that the logs of both are one. */
void faults_set_clock(unsigned long now) { atomic_store(&clock_now, now); }

static int is_ours(const char *path)
{
    return strncmp(path, root, root_size) == 0 && (path[root_size] == '/' || path[root_size] == 0);
}

static int path_of_fd(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = 0;
    return size > 0;
}

static int path_at(int directory, const char *name, char *path)
{
    if (name[0] == '/')
        return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX;
    char base[PATH_MAX];
    if (directory != AT_FDCWD) {
        if (!path_of_fd(directory, base)) return 0;
    } else if (syscall(SYS_getcwd, base, sizeof base) < 0) {
        return 0;
    }
    return snprintf(path, PATH_MAX, "%s/%s", base, name) < PATH_MAX;
}

static uint64_t inode_of_path(const char *path, uint32_t *flags)
{
    struct stat about;
    if (fstatat(AT_FDCWD, path, &about, AT_SYMLINK_NOFOLLOW) < 0) return 0;
    if (flags && S_ISDIR(about.st_mode)) *flags |= IS_DIRECTORY;
    if (flags && !S_ISDIR(about.st_mode) && about.st_nlink == 1) *flags |= LAST_LINK;
    return about.st_ino;
}

struct call {
    struct entry entry;
    char path[PATH_MAX], second[PATH_MAX];
    const void *data; /* logged after the paths */
    size_t data_size;
    void *taken; /* the mapping to give back */
    size_t taken_size;
};

/* The bytes of a file as they are now, in memory that `leave` gives back. */
static void take_content(struct call *call, const char *path)
{
    if (!log_data) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (fd < 0) return;
    if (fstat(fd, &about) == 0 && about.st_size > 0) {
        void *copy = (void *)syscall(SYS_mmap, NULL, about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy != MAP_FAILED) {
            ssize_t size = syscall(SYS_pread64, fd, copy, about.st_size, 0);
            call->taken = copy;
            call->taken_size = about.st_size;
            call->data = copy;
            call->data_size = size > 0 ? size : 0;
        }
    }
    syscall(SYS_close, fd);
}

enum verdict { GO, REFUSED, HALF };

/* Number the call and do what was asked for; on REFUSED the caller reports `fault_errno`. */
static enum verdict enter(struct call *call, enum name name)
{
    int wanted = (counted_names >> name) & 1;
    call->entry.magic = 0x464c5453;
    call->entry.name = name;
    if (wanted) call->entry.number = atomic_fetch_add(&count, 1) + 1;
    call->entry.begin = faults_clock();
    if (!wanted || !atomic_load(&faults_on) || action == NOTHING) return GO;
    long number = (long)call->entry.number;
    if (number != fault_number && !(fault_lasts && number > fault_number)) return GO;
    if (action == KILL_BEFORE) die();
    if (action == KILL_AFTER) return GO;
    atomic_fetch_add(&hits, 1);
    return action == SHORT_WRITE ? HALF : REFUSED;
}

static void leave(struct call *call, int error)
{
    struct entry *entry = &call->entry;
    int before = errno;
    entry->end = faults_clock();
    entry->error = error;
    if (log_fd >= 0) {
        const char *path = call->path + (is_ours(call->path) ? root_size : 0);
        const char *second = call->second + (call->second[0] && is_ours(call->second) ? root_size : 0);
        entry->path_size = strlen(path);
        entry->second_size = strlen(second);
        entry->data_size = log_data && !error ? call->data_size : 0;
        struct iovec parts[4] = {
            {entry, sizeof *entry}, {(void *)path, entry->path_size}, {(void *)second, entry->second_size},
            {(void *)call->data, entry->data_size},
        };
        syscall(SYS_writev, log_fd, parts, 4);
    }
    if (call->taken) syscall(SYS_munmap, call->taken, call->taken_size);
    if (action == KILL_AFTER && atomic_load(&faults_on) && entry->number && (long)entry->number == fault_number) die();
    errno = before;
}

static struct call *begin(struct call *call)
{
    memset(&call->entry, 0, sizeof call->entry);
    call->path[0] = call->second[0] = 0;
    call->data = call->taken = NULL;
    call->data_size = call->taken_size = 0;
    return call;
}

/* ------------------------------------------------------------------------------------------------- opening, mapping */

typedef int open_function(int directory, const char *name, int flags, mode_t mode);

static int really_open(int directory, const char *name, int flags, mode_t mode)
{
    return (int)syscall(SYS_openat, directory, name, flags, mode);
}

static int open_it(int directory, const char *name, int flags, mode_t mode)
{
    struct call call;
    if (!atomic_load(&armed) || !path_at(directory, name, begin(&call)->path) || !is_ours(call.path))
        return really_open(directory, name, flags, mode);
    enum name kind = flags & (O_CREAT | O_TRUNC) ? CREATE : OPEN;
    if (kind == CREATE && !inode_of_path(call.path, NULL)) call.entry.flags |= IS_NEW;
    call.entry.offset = flags;
    if (enter(&call, kind) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    int fd = really_open(directory, name, flags, mode);
    if (fd >= 0) {
        struct stat about;
        if (fstat(fd, &about) == 0) call.entry.inode = about.st_ino;
    }
    leave(&call, fd < 0 ? errno : 0);
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, int); \
        va_end(rest); \
    }

#ifndef O_LARGEFILE
#define O_LARGEFILE 0
#endif
int open(const char *name, int flags, ...) { MODE(flags) return open_it(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return open_it(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int at, const char *name, int flags, ...) { MODE(flags) return open_it(at, name, flags | O_LARGEFILE, mode); }
int openat64(int at, const char *name, int flags, ...) { MODE(flags) return open_it(at, name, flags | O_LARGEFILE, mode); }
int __open_2(const char *name, int flags) { return open_it(AT_FDCWD, name, flags | O_LARGEFILE, 0); }
int __open64_2(const char *name, int flags) { return open_it(AT_FDCWD, name, flags | O_LARGEFILE, 0); }
int __openat_2(int at, const char *name, int flags) { return open_it(at, name, flags | O_LARGEFILE, 0); }
int __openat64_2(int at, const char *name, int flags) { return open_it(at, name, flags | O_LARGEFILE, 0); }

static void lock_mappings(void)
{
    while (atomic_flag_test_and_set(&mapping_lock)) syscall(SYS_sched_yield);
}

static void unlock_mappings(void) { atomic_flag_clear(&mapping_lock); }

static void *map_it(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    struct call call;
    if (!atomic_load(&armed) || fd < 0 || !(flags & MAP_SHARED) || !path_of_fd(fd, begin(&call)->path) || !is_ours(call.path))
        return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
    call.entry.offset = offset;
    call.entry.size = size;
    if (enter(&call, MMAP) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return MAP_FAILED;
    }
    void *mapped = (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
    struct stat about;
    if (mapped != MAP_FAILED && fstat(fd, &about) == 0) {
        call.entry.inode = about.st_ino;
        lock_mappings();
        if (mapping_num == MAPPINGS) { /* A log that misses a mapping would be wrong without a word. */
            static const char text[] = "the fault layer knows no more mappings (MAPPINGS)\n";
            syscall(SYS_write, STDERR_FILENO, text, sizeof text - 1);
            die();
        }
        struct mapping *mapping = &mappings[mapping_num++];
        mapping->begin = mapped;
        mapping->size = size;
        mapping->writable = (protection & PROT_WRITE) != 0;
        mapping->inode = about.st_ino;
        mapping->offset = offset;
        memcpy(mapping->path, call.path, sizeof mapping->path);
        unlock_mappings();
        if (watches_stores() && protection & PROT_WRITE) mprotect(mapped, size, PROT_READ);
    }
    leave(&call, mapped == MAP_FAILED ? errno : 0);
    return mapped;
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    return map_it(address, size, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    return map_it(address, size, protection, flags, fd, offset);
}

int munmap(void *address, size_t size)
{
    if (atomic_load(&armed)) {
        lock_mappings();
        for (int i = 0; i < mapping_num; i++)
            if (mappings[i].begin == address) {
                mappings[i] = mappings[--mapping_num];
                break;
            }
        unlock_mappings();
    }
    return (int)syscall(SYS_munmap, address, size);
}

/* ------------------------------------------------------------------------------------------------------------ stores

   Mappings are given out read-only.  A store to one faults; it is counted, its page is opened, and the processor runs that
   one instruction (the trap flag), after which the page is closed again.  An instruction that writes to two pages faults
   twice.  One thread writes to a store at a time; what the layer itself copies it only reads. */

static int watches_stores(void) { return (counted_names >> STORE) & 1; }

#ifdef __x86_64__
#define TRAP_FLAG 0x100
#define OPEN_PAGES 8
static char *open_pages[OPEN_PAGES];
static int open_page_num;
static const size_t page_size = 4096;

static void on_fault(int number, siginfo_t *info, void *context)
{
    char *at = info->si_addr, path[PATH_MAX];
    int found = 0;
    for (int i = 0; i < mapping_num && !found; i++)
        if (mappings[i].writable && at >= mappings[i].begin && at < mappings[i].begin + mappings[i].size) {
            found = 1;
            memcpy(path, mappings[i].path, sizeof path);
        }
    if (!found || open_page_num == OPEN_PAGES) {
        signal(number, SIG_DFL); /* No store to a mapping of ours: the fault comes again, and ends the process. */
        return;
    }
    static struct call call;
    memcpy(begin(&call)->path, path, sizeof call.path);
    enter(&call, STORE);
    char *page = (char *)((uintptr_t)at & ~(page_size - 1));
    mprotect(page, page_size, PROT_READ | PROT_WRITE);
    open_pages[open_page_num++] = page;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
}

static void on_trap(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info;
    while (open_page_num) mprotect(open_pages[--open_page_num], page_size, PROT_READ);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~(unsigned long long)TRAP_FLAG;
}

static void watch_stores(void)
{
    struct sigaction fault = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    struct sigaction trap = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &fault, NULL);
    sigaction(SIGTRAP, &trap, NULL);
}

/* Whether stores can be counted here. */
int faults_sees_stores(void) { return 1; }
#else
static void watch_stores(void) { die(); }
int faults_sees_stores(void) { return 0; }
#endif

/* Log what every mapping holds now: the system may write any of it to the disk at any time from now on. */
void faults_photo(void)
{
    static struct call call;
    if (!log_data || log_fd < 0) return;
    lock_mappings();
    for (int i = 0; i < mapping_num; i++) {
        begin(&call)->entry.magic = 0x464c5453;
        call.entry.name = PHOTO;
        call.entry.begin = faults_clock();
        call.entry.inode = mappings[i].inode;
        call.entry.offset = mappings[i].offset;
        call.entry.size = mappings[i].size;
        memcpy(call.path, mappings[i].path, sizeof call.path);
        call.data = mappings[i].begin;
        call.data_size = mappings[i].size;
        leave(&call, 0);
    }
    unlock_mappings();
}

/* ----------------------------------------------------------------------------------------------------------- forcing */

int msync(void *address, size_t size, int flags)
{
    struct call call;
    begin(&call);
    if (atomic_load(&armed)) {
        lock_mappings();
        for (int i = 0; i < mapping_num; i++) {
            struct mapping *mapping = &mappings[i];
            if ((char *)address < mapping->begin || (char *)address >= mapping->begin + mapping->size) continue;
            call.entry.inode = mapping->inode;
            call.entry.offset = mapping->offset + ((char *)address - mapping->begin);
            call.entry.size = size;
            memcpy(call.path, mapping->path, sizeof mapping->path);
            break;
        }
        unlock_mappings();
    }
    if (!call.path[0]) return (int)syscall(SYS_msync, address, size, flags);
    if (enter(&call, MSYNC) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    if (log_data && flags & MS_SYNC) {
        /* A copy, so that what comes while the call runs does not count as forced. */
        void *copy = (void *)syscall(SYS_mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy == MAP_FAILED) die();
        memcpy(copy, address, size);
        call.data = call.taken = copy;
        call.data_size = call.taken_size = size;
    }
    int answer = (int)syscall(SYS_msync, address, size, flags);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

static int force(int fd, enum name name, long number)
{
    struct call call;
    if (!atomic_load(&armed) || !path_of_fd(fd, begin(&call)->path) || !is_ours(call.path)) return (int)syscall(number, fd);
    struct stat about;
    if (fstat(fd, &about) == 0) {
        call.entry.inode = about.st_ino;
        call.entry.size = about.st_size;
        if (S_ISDIR(about.st_mode)) call.entry.flags |= IS_DIRECTORY;
    }
    if (enter(&call, name) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    if (!(call.entry.flags & IS_DIRECTORY)) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        take_content(&call, link);
    }
    int answer = (int)syscall(number, fd);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

int fsync(int fd) { return force(fd, FSYNC, SYS_fsync); }
int fdatasync(int fd) { return force(fd, FDATASYNC, SYS_fdatasync); }

/* ----------------------------------------------------------------------------------------------------------- writing */

static ssize_t write_it(int fd, const void *data, size_t size, off_t offset, int at)
{
    struct call call;
    if (!atomic_load(&armed) || !path_of_fd(fd, begin(&call)->path) || !is_ours(call.path))
        return at ? syscall(SYS_pwrite64, fd, data, size, offset) : syscall(SYS_write, fd, data, size);
    call.entry.offset = offset;
    call.entry.size = size;
    enum verdict verdict = enter(&call, at ? PWRITE : WRITE);
    if (verdict == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    if (verdict == HALF) size = (size + 1) / 2;
    ssize_t answer = at ? syscall(SYS_pwrite64, fd, data, size, offset) : syscall(SYS_write, fd, data, size);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

ssize_t write(int fd, const void *data, size_t size) { return write_it(fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return write_it(fd, data, size, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return write_it(fd, data, size, offset, 1); }

static int truncate_it(int fd, off_t size)
{
    struct call call;
    if (!atomic_load(&armed) || !path_of_fd(fd, begin(&call)->path) || !is_ours(call.path))
        return (int)syscall(SYS_ftruncate, fd, size);
    call.entry.size = size;
    if (enter(&call, FTRUNCATE) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    int answer = (int)syscall(SYS_ftruncate, fd, size);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

int ftruncate(int fd, off_t size) { return truncate_it(fd, size); }
int ftruncate64(int fd, off_t size) { return truncate_it(fd, size); }

/* The real one is taken: it writes zeros where the file system cannot allocate.  It returns its error. */
static int allocate(int fd, off_t offset, off_t size)
{
    REAL(posix_fallocate64);
    struct call call;
    if (!atomic_load(&armed) || !path_of_fd(fd, begin(&call)->path) || !is_ours(call.path))
        return real_posix_fallocate64(fd, offset, size);
    call.entry.offset = offset;
    call.entry.size = size;
    if (enter(&call, FALLOCATE) == REFUSED) {
        leave(&call, fault_errno);
        return fault_errno;
    }
    int error = real_posix_fallocate64(fd, offset, size);
    leave(&call, error);
    return error;
}

int posix_fallocate(int fd, off_t offset, off_t size) { return allocate(fd, offset, size); }
int posix_fallocate64(int fd, off_t offset, off_t size) { return allocate(fd, offset, size); }

/* ------------------------------------------------------------------------------------------------------- directories */

static int link_it(int from_at, const char *from, int to_at, const char *to, int flags)
{
    struct call call;
    if (!atomic_load(&armed) || !path_at(from_at, from, begin(&call)->path) || !path_at(to_at, to, call.second) ||
        !is_ours(call.second))
        return (int)syscall(SYS_linkat, from_at, from, to_at, to, flags);
    call.entry.inode = inode_of_path(call.path, NULL);
    if (enter(&call, LINK) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    int answer = (int)syscall(SYS_linkat, from_at, from, to_at, to, flags);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

int link(const char *from, const char *to) { return link_it(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_at, const char *from, int to_at, const char *to, int flags) { return link_it(from_at, from, to_at, to, flags); }

static int rename_it(int from_at, const char *from, int to_at, const char *to, unsigned int flags)
{
    struct call call;
    if (!atomic_load(&armed) || !path_at(from_at, from, begin(&call)->path) || !path_at(to_at, to, call.second) ||
        !(is_ours(call.path) || is_ours(call.second)))
        return (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    call.entry.inode = inode_of_path(call.path, &call.entry.flags);
    call.entry.flags &= IS_DIRECTORY;
    uint32_t replaced = 0;
    call.entry.replaced = inode_of_path(call.second, &replaced);
    if (replaced & LAST_LINK) {
        call.entry.flags |= LAST_LINK;
        take_content(&call, call.second);
    }
    if (enter(&call, RENAME) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    int answer = (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

int rename(const char *from, const char *to) { return rename_it(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_at, const char *from, int to_at, const char *to) { return rename_it(from_at, from, to_at, to, 0); }
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned int flags)
{
    return rename_it(from_at, from, to_at, to, flags);
}

static int unlink_it(int at, const char *name, int flags)
{
    struct call call;
    if (!atomic_load(&armed) || !path_at(at, name, begin(&call)->path) || !is_ours(call.path))
        return (int)syscall(SYS_unlinkat, at, name, flags);
    call.entry.inode = inode_of_path(call.path, &call.entry.flags);
    if (call.entry.flags & LAST_LINK) take_content(&call, call.path);
    if (enter(&call, flags & AT_REMOVEDIR ? RMDIR : UNLINK) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    int answer = (int)syscall(SYS_unlinkat, at, name, flags);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

int unlink(const char *name) { return unlink_it(AT_FDCWD, name, 0); }
int unlinkat(int at, const char *name, int flags) { return unlink_it(at, name, flags); }
int rmdir(const char *name) { return unlink_it(AT_FDCWD, name, AT_REMOVEDIR); }

static int make_directory(int at, const char *name, mode_t mode)
{
    struct call call;
    if (!atomic_load(&armed) || !path_at(at, name, begin(&call)->path) || !is_ours(call.path))
        return (int)syscall(SYS_mkdirat, at, name, mode);
    call.entry.flags = IS_DIRECTORY;
    if (enter(&call, MKDIR) == REFUSED) {
        leave(&call, fault_errno);
        errno = fault_errno;
        return -1;
    }
    int answer = (int)syscall(SYS_mkdirat, at, name, mode);
    if (answer == 0) call.entry.inode = inode_of_path(call.path, NULL);
    leave(&call, answer < 0 ? errno : 0);
    return answer;
}

int mkdir(const char *name, mode_t mode) { return make_directory(AT_FDCWD, name, mode); }
int mkdirat(int at, const char *name, mode_t mode) { return make_directory(at, name, mode); }
