#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "team.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

/* The OpenMP runtime that PyTorch has loaded, asked by its own names: a second one would bring threads of its own to
 * processors where PyTorch's wait, turning, for the next operation. */
static struct {
    void (*parallel)(void (*function)(void *), void *data, unsigned num_threads, unsigned flags);
    int (*max_threads)(void), (*num_threads)(void), (*thread_number)(void);
    int (*pause)(int kind);
    int is_used; /* since it was last paused */
    pid_t process; /* of which this was found out */
} team;

static pid_t loaded_by; /* the process that loaded this */

__attribute__((constructor)) static void note_process(void)
{
    loaded_by = getpid();
}

/* Whether this process is a forked child: it has inherited a runtime whose threads are gone, and would wait for them.
 * Of one that was forked before it loaded this, Linux tells by a flag that the next exec takes away. */
static int is_forked(void)
{
    enum { PF_FORKNOEXEC = 0x40 };
    if (getpid() != loaded_by)
        return 1;
    char text[512];
    FILE *file = fopen("/proc/self/stat", "r");
    size_t length = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file != NULL)
        fclose(file);
    text[length] = '\0';
    const char *rest = NULL; /* after the program's name, which may hold anything in its parentheses */
    for (size_t index = 0; index < length; index++)
        if (text[index] == ')')
            rest = text + index + 1;
    unsigned flags;
    if (rest == NULL || sscanf(rest, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1)
        return 1;
    return (flags & PF_FORKNOEXEC) != 0;
}

/* Before a fork: let the other threads go, for the bare program may never have had any. A child that inherits the runtime's
 * note of them waits for them for ever at its first parallel region. They come back when they are needed. */
static void release_team(void)
{
    enum { OMP_PAUSE_SOFT = 1 };
    if (team.is_used)
        team.pause(OMP_PAUSE_SOFT);
    team.is_used = 0;
}

/* Whether all functions are one library's: with the threads of one and their numbers by another pieces would be left undone. */
static int is_one_library(void *const *functions, size_t count)
{
    Dl_info first, own;
    for (size_t index = 0; index < count; index++)
        if (functions[index] == NULL || !dladdr(functions[index], index ? &own : &first) ||
            (index && own.dli_fbase != first.dli_fbase))
            return 0;
    return 1;
}

static void find_team(pid_t process)
{
    team.process = process;
    *(void **)&team.parallel = is_forked() ? NULL : dlsym(RTLD_DEFAULT, "GOMP_parallel");
    *(void **)&team.max_threads = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    *(void **)&team.num_threads = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    *(void **)&team.thread_number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&team.pause = dlsym(RTLD_DEFAULT, "omp_pause_resource_all");
    static int is_registered;
    if (team.parallel != NULL && team.pause != NULL && !is_registered)
        is_registered = pthread_atfork(release_team, NULL, NULL) == 0;
    void *functions[] = {*(void **)&team.parallel, *(void **)&team.max_threads, *(void **)&team.num_threads,
                         *(void **)&team.thread_number, *(void **)&team.pause};
    if (!is_registered || !is_one_library(functions, sizeof functions / sizeof *functions))
        team.parallel = NULL;
}

typedef struct {
    Work work;
    void *context;
    size_t count, least;
} Task;

static void take_part(void *data)
{
    const Task *task = data;
    size_t num_threads = (size_t)team.num_threads(), number = (size_t)team.thread_number();
    size_t most = (task->count + task->least - 1) / task->least;
    size_t share = num_threads < most ? num_threads : most;
    size_t pieces = (task->count + share - 1) / share, begin = number * pieces, end = begin + pieces;
    if (begin < task->count)
        task->work(task->context, begin, end < task->count ? end : task->count);
}

void in_team(Work work, void *context, size_t count, size_t least)
{
    if (count >= 2 * least) {
        pid_t process = getpid();
        if (team.process != process)
            find_team(process);
        if (team.parallel != NULL && team.max_threads() > 1) {
            Task task = {work, context, count, least};
            team.is_used = 1;
            team.parallel(take_part, &task, 0, 0);
            return;
        }
    }
    work(context, 0, count);
}
#else
void in_team(Work work, void *context, size_t count, size_t least)
{
    (void)least;
    work(context, 0, count);
}
#endif
