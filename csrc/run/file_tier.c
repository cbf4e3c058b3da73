/* file_tier.c - the file, and the thread that moves loads. */
#include "file_tier.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statfs.h>
#include <unistd.h>

enum { CHUNK_BYTES = 1 << 20 }; /* of one transfer, a multiple of the alignment: long enough for a disk, soon over */

typedef s1f_tier_load load;

typedef struct { /* the first transfer that failed */
    int error;   /* errno; 0: none; EIO where a read came to the end of the file */
    int32_t comes_in;
    int64_t bytes, done;
} failure;

typedef struct {
    s1f_tier head;
    int file, is_direct; /* transfers go past the page cache */
    char *directory;
    char *chunk; /* where transfers past the page cache cannot take memory as it is */
    pthread_t thread;
    pid_t process;        /* whose thread it is: a forked one has none */
    s1f_signal ended;     /* ticket of the last transfer that has ended */
    uint64_t last_ticket; /* the caller's thread alone */
    pthread_mutex_t lock; /* over what follows */
    pthread_cond_t changed;
    load *first_job, *last_job;
    int is_moving, is_ending;
    _Atomic int is_reset; /* the transfer that runs is to stop */
    failure failed;
} file_tier;

/* -- transfers: the thread's --------------------------------------------------------------------------------------- */

/* Moves all of the bytes. Returns errno, 0 if it went well. */
static int transfer(const file_tier *tier, int comes_in, char *data, int64_t bytes, int64_t offset)
{
    while (bytes > 0) {
        ssize_t done =
            comes_in ? pread(tier->file, data, (size_t)bytes, offset) : pwrite(tier->file, data, (size_t)bytes, offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? errno : EIO; /* the file ends too early */
        data += done;
        bytes -= done;
        offset += done;
    }
    return 0;
}

/* One chunk of a part, by way of the tier's own memory where the part's does not lie as transfers need it. */
static int move_chunk(file_tier *tier, int comes_in, char *data, int64_t bytes, int64_t offset)
{
    int64_t whole = s1f_tier_rounded(bytes);
    if (!tier->is_direct)
        return transfer(tier, comes_in, data, bytes, offset);
    if (comes_in)
        return transfer(tier, 1, data, whole, offset);
    if ((uintptr_t)data % S1F_TIER_ALIGNMENT == 0 && bytes == whole)
        return transfer(tier, 0, data, bytes, offset);
    memcpy(tier->chunk, data, (size_t)bytes);
    memset(tier->chunk + bytes, 0, (size_t)(whole - bytes));
    return transfer(tier, 0, tier->chunk, whole, offset);
}

/* Without it the page cache would hold what has just left memory. */
static void give_up_pages(const file_tier *tier, const load *moved)
{
    if (tier->is_direct || tier->head.facts.is_memory)
        return;
    if (!moved->comes_in)
        (void)sync_file_range(tier->file, moved->offset, moved->bytes,
                              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    (void)posix_fadvise(tier->file, moved->offset, moved->bytes, POSIX_FADV_DONTNEED);
}

static void move_load(file_tier *tier, const load *moved)
{
    int64_t offset = moved->offset, sum = 0, start = s1f_now_ns();
    int error = 0;
    for (int32_t i = 0; i < moved->num_parts && error == 0; i++) {
        const s1f_tier_part *part = &moved->parts[i];
        for (int64_t at = 0; at < part->bytes && error == 0; at += CHUNK_BYTES) {
            int64_t left = part->bytes - at, bytes = left < CHUNK_BYTES ? left : CHUNK_BYTES;
            if (atomic_load(&tier->is_reset))
                return;
            error = move_chunk(tier, moved->comes_in, (char *)part->data + at, bytes, offset + at);
            sum += error == 0 ? bytes : 0;
        }
        offset += s1f_tier_rounded(part->bytes);
    }
    if (error == 0)
        give_up_pages(tier, moved);
    int64_t took = s1f_now_ns() - start;
    pthread_mutex_lock(&tier->lock);
    if (error != 0) {
        tier->failed = (failure){error, moved->comes_in, moved->bytes, sum};
    } else {
        *(moved->comes_in ? &tier->head.facts.bytes_in : &tier->head.facts.bytes_out) += sum;
        *(moved->comes_in ? &tier->head.facts.ns_in : &tier->head.facts.ns_out) += took;
    }
    pthread_mutex_unlock(&tier->lock);
}

static void *move_loads(void *argument)
{
    file_tier *tier = argument;
    pthread_mutex_lock(&tier->lock);
    while (!tier->is_ending) {
        load *job = tier->first_job;
        if (job == NULL) {
            pthread_cond_wait(&tier->changed, &tier->lock);
            continue;
        }
        tier->first_job = job->next_job;
        uint64_t ticket = job->ticket;
        tier->is_moving = tier->failed.error == 0; /* nothing is moved after a failure */
        pthread_mutex_unlock(&tier->lock);
        if (tier->is_moving)
            move_load(tier, job);
        pthread_mutex_lock(&tier->lock);
        tier->is_moving = 0;
        pthread_cond_broadcast(&tier->changed);
        s1f_signal_raise(&tier->ended, ticket);
    }
    pthread_mutex_unlock(&tier->lock);
    return NULL;
}

/* -- the file ------------------------------------------------------------------------------------------------------ */

static const struct {
    unsigned long magic;
    const char *name;
    int is_memory;
} file_systems[] = {{0x01021994, "tmpfs", 1}, {0x858458f6, "ramfs", 1}, {0xef53, "ext4", 0},
                    {0x58465342, "xfs", 0},   {0x9123683e, "btrfs", 0}, {0x794c7630, "overlayfs", 0},
                    {0x6969, "nfs", 0},       {0x2fc12fc1, "zfs", 0},   {0xf2f52010, "f2fs", 0},
                    {0x65735546, "fuse", 0},  {0x01021997, "9p", 0},    {0xff534d42, "cifs", 0}};

static s1f_status name_file_system(file_tier *tier)
{
    struct statfs found;
    if (fstatfs(tier->file, &found) != 0)
        return s1f_fail(S1F_ERR_SYSTEM, "offload directory %s: %s", tier->directory, strerror(errno));
    unsigned long magic = (unsigned long)found.f_type & 0xffffffffu;
    snprintf(tier->head.facts.medium, sizeof tier->head.facts.medium, "file system %lx", magic);
    for (size_t i = 0; i < sizeof file_systems / sizeof *file_systems; i++)
        if (file_systems[i].magic == magic) {
            snprintf(tier->head.facts.medium, sizeof tier->head.facts.medium, "%s", file_systems[i].name);
            tier->head.facts.is_memory = file_systems[i].is_memory;
        }
    return S1F_OK;
}

/* A file without a name: made so, or unlinked at once where the file system has no such files. */
static int open_without_name(const char *directory, int flags)
{
    int file = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT))
        return file;
    char path[4096];
    if (snprintf(path, sizeof path, "%s/seq1f1b-XXXXXX", directory) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    file = mkostemp(path, O_CLOEXEC | flags);
    if (file >= 0)
        (void)unlink(path);
    return file;
}

/* Writes and reads one block: a directory that takes a file may have no room, or refuse transfers past the cache. */
static int try_block(file_tier *tier)
{
    memset(tier->chunk, 0x5a, S1F_TIER_ALIGNMENT);
    int error = transfer(tier, 0, tier->chunk, S1F_TIER_ALIGNMENT, 0);
    if (error == 0)
        error = transfer(tier, 1, tier->chunk, S1F_TIER_ALIGNMENT, 0);
    return error;
}

static s1f_status open_file(file_tier *tier)
{
    int flags = O_DIRECT, error;
    for (;;) {
        tier->is_direct = flags != 0;
        tier->file = open_without_name(tier->directory, flags);
        error = tier->file < 0 ? errno : try_block(tier);
        if (error != EINVAL || flags == 0)
            break;
        if (tier->file >= 0)
            close(tier->file);
        flags = 0;
    }
    if (error != 0)
        return s1f_fail(S1F_ERR_SYSTEM, "offload directory %s: no file can be %s there: %s", tier->directory,
                        tier->file < 0 ? "made" : "written and read", strerror(error));
    return name_file_system(tier);
}

static int start_thread(file_tier *tier)
{
    tier->process = getpid();
    sigset_t all, before;
    sigfillset(&all); /* signals are for the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&tier->thread, NULL, move_loads, tier);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void free_parts(file_tier *tier)
{
    if (tier->file >= 0)
        close(tier->file);
    pthread_cond_destroy(&tier->changed);
    pthread_mutex_destroy(&tier->lock);
    free(tier->chunk);
    free(tier->directory);
    free(tier);
}

/* -- the kind ------------------------------------------------------------------------------------------------------ */

static file_tier *of(s1f_tier *tier)
{
    return (file_tier *)tier;
}

static void get_facts(s1f_tier *head, s1f_tier_facts *out)
{
    file_tier *tier = of(head);
    pthread_mutex_lock(&tier->lock);
    *out = head->facts;
    pthread_mutex_unlock(&tier->lock);
}

static s1f_status begin(s1f_tier *head, load *job)
{
    file_tier *tier = of(head);
    job->ticket = ++tier->last_ticket;
    job->next_job = NULL;
    pthread_mutex_lock(&tier->lock);
    if (job->offset + job->bytes > tier->head.facts.room_bytes)
        tier->head.facts.room_bytes = job->offset + job->bytes;
    if (tier->first_job == NULL)
        tier->first_job = job;
    else
        tier->last_job->next_job = job;
    tier->last_job = job;
    pthread_cond_broadcast(&tier->changed);
    pthread_mutex_unlock(&tier->lock);
    return S1F_OK;
}

static s1f_status tell(const file_tier *tier, failure failed)
{
    struct statfs found = {0};
    int is_full = failed.error == ENOSPC || failed.error == EDQUOT || failed.error == EFBIG;
    (void)fstatfs(tier->file, &found);
    s1f_fail(S1F_ERR_SYSTEM, "offload directory %s (%s): %s %lld bytes failed after %lld: %s", tier->directory,
             tier->head.facts.medium, failed.comes_in ? "reading" : "writing", (long long)failed.bytes,
             (long long)failed.done, strerror(failed.error));
    char text[512];
    snprintf(text, sizeof text, "%s", s1f_last_error());
    if (is_full)
        return s1f_fail(
            S1F_ERR_SYSTEM,
            "%s; the file holds up to %lld bytes, and %lld are free: give Memory(offload=) a directory with "
            "more room, or move fewer units by Memory(units=)",
            text, (long long)tier->head.facts.room_bytes, (long long)found.f_bavail * (long long)found.f_bsize);
    return s1f_fail(S1F_ERR_SYSTEM, "%s: give Memory(offload=) a directory on another disk", text);
}

static s1f_status wait(s1f_tier *head, s1f_group *group, load *known)
{
    file_tier *tier = of(head);
    s1f_wait_reason reason = {
        .peer_rank = -1, .patient = 1, .hangup_fd = -1, .purpose = "waiting for", .edge = "the tier", .sequence = -1};
    S1F_TRY(s1f_group_wait(group, &tier->ended, known->ticket, &reason));
    pthread_mutex_lock(&tier->lock);
    failure failed = tier->failed;
    pthread_mutex_unlock(&tier->lock);
    return failed.error == 0 ? S1F_OK : tell(tier, failed);
}

static void reset(s1f_tier *head)
{
    file_tier *tier = of(head);
    atomic_store(&tier->is_reset, 1);
    pthread_mutex_lock(&tier->lock);
    tier->first_job = NULL;
    while (tier->is_moving)
        pthread_cond_wait(&tier->changed, &tier->lock);
    tier->failed = (failure){0};
    atomic_store(&tier->is_reset, 0);
    pthread_mutex_unlock(&tier->lock);
}

static void free_tier(s1f_tier *head)
{
    file_tier *tier = of(head);
    if (tier->process != getpid())
        return;
    s1f_tier_reset(head);
    pthread_mutex_lock(&tier->lock);
    tier->is_ending = 1;
    pthread_cond_broadcast(&tier->changed);
    pthread_mutex_unlock(&tier->lock);
    pthread_join(tier->thread, NULL);
    free_parts(tier);
}

static const s1f_tier_kind file_kind = {
    .alignment = S1F_TIER_ALIGNMENT,
    .get_facts = get_facts,
    .begin = begin,
    .wait = wait,
    .reset = reset,
    .free = free_tier,
};

s1f_status s1f_file_tier_create(const char *directory, s1f_tier **out)
{
    file_tier *tier = calloc(1, sizeof *tier);
    if (tier == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a tier");
    tier->head.kind = &file_kind;
    tier->file = -1;
    pthread_mutex_init(&tier->lock, NULL);
    pthread_cond_init(&tier->changed, NULL);
    tier->directory = strdup(directory);
    void *chunk = NULL;
    s1f_status status = S1F_OK;
    if (tier->directory == NULL || posix_memalign(&chunk, S1F_TIER_ALIGNMENT, CHUNK_BYTES) != 0)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for a tier");
    tier->chunk = chunk;
    if (status == S1F_OK)
        status = open_file(tier);
    int error = status == S1F_OK ? start_thread(tier) : 0;
    if (error != 0)
        status = s1f_fail(S1F_ERR_SYSTEM, "no thread for the offload directory %s: %s", directory, strerror(error));
    if (status != S1F_OK) {
        free_parts(tier);
        return status;
    }
    *out = &tier->head;
    return S1F_OK;
}
