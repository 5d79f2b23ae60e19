/* Work spread over the threads that PyTorch's own operations on a CPU run on. */
#ifndef BITCHECK_TEAM_H
#define BITCHECK_TEAM_H

#include <stddef.h>

/* Do the pieces from `begin` up to `end` of a work; on several threads at once, so without Python. */
typedef void (*Work)(void *context, size_t begin, size_t end);

/* Do `count` pieces of a work. Each thread takes one range of them, `least` pieces at least, in the order in which
 * PyTorch divides a tensor: what an operation left in a processor's cache is found there. */
void in_team(Work work, void *context, size_t count, size_t least);

#endif
