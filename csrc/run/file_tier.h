/* file_tier.h - a tier that is a file: one thread writes and reads it beside the units.
 *
 * The file has no name, so that nothing of it stays when the process ends, however it ends. Where the file system takes
 * it, transfers go past the page cache; elsewhere its pages are given up at once. */
#ifndef S1F_FILE_TIER_H
#define S1F_FILE_TIER_H

#include "tier.h"

/* Makes the file in this directory, tries one block of it, and starts the thread. S1F_ERR_SYSTEM names directory and
 * cause. *out is owned by the caller (s1f_tier_free, which waits for the transfer that runs) and untouched on error. */
s1f_status s1f_file_tier_create(const char *directory, s1f_tier **out);

#endif
