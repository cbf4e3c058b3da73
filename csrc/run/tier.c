/* tier.c - the loads of a tier and their room: what both kinds share. */
#include "tier.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int64_t s1f_tier_rounded(int64_t bytes)
{
    return (bytes + S1F_TIER_ALIGNMENT - 1) / S1F_TIER_ALIGNMENT * S1F_TIER_ALIGNMENT;
}

static s1f_tier_load *find(const s1f_tier *tier, int64_t number)
{
    s1f_tier_load *found = tier->loads;
    while (found != NULL && found->number != number)
        found = found->next;
    return found;
}

/* Puts the load into the first gap that holds it. */
static void place(s1f_tier *tier, s1f_tier_load *added)
{
    s1f_tier_load **at = &tier->loads;
    int64_t end = 0;
    while (*at != NULL && (*at)->offset - end < added->bytes) {
        end = (*at)->offset + (*at)->bytes;
        at = &(*at)->next;
    }
    added->offset = end;
    added->next = *at;
    *at = added;
}

static void forget(s1f_tier *tier, s1f_tier_load *known)
{
    s1f_tier_load **at = &tier->loads;
    while (*at != known)
        at = &(*at)->next;
    *at = known->next;
    free(known);
}

s1f_status s1f_tier_begin_step(s1f_tier *tier, int64_t most_loads)
{
    s1f_tier_facts *facts = &tier->facts;
    facts->bytes_out = facts->bytes_in = facts->ns_out = facts->ns_in = 0;
    return tier->kind->begin_step == NULL ? S1F_OK : tier->kind->begin_step(tier, most_loads);
}

s1f_status s1f_tier_out(s1f_tier *tier, int64_t number, const s1f_tier_part *parts, int32_t num_parts)
{
    assert(find(tier, number) == NULL);
    s1f_tier_load *added = calloc(1, sizeof *added + (size_t)num_parts * sizeof *parts);
    if (added == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a load of %d parts", (int)num_parts);
    added->number = number;
    added->num_parts = num_parts;
    for (int32_t i = 0; i < num_parts; i++) {
        added->parts[i] = parts[i];
        added->bytes += s1f_tier_rounded(parts[i].bytes);
    }
    place(tier, added);
    return tier->kind->begin(tier, added); /* also on an error it stays until the reset: part of it may be under way */
}

s1f_status s1f_tier_in(s1f_tier *tier, int64_t number, const s1f_tier_part *parts, int32_t num_parts)
{
    s1f_tier_load *known = find(tier, number);
    assert(known != NULL && !known->comes_in && known->is_awaited && num_parts == known->num_parts);
    for (int32_t i = 0; i < num_parts; i++)
        assert(parts[i].bytes == known->parts[i].bytes &&
               (uintptr_t)parts[i].data % (uintptr_t)tier->kind->alignment == 0);
    memcpy(known->parts, parts, (size_t)num_parts * sizeof *parts);
    known->comes_in = 1;
    known->is_awaited = 0;
    return tier->kind->begin(tier, known);
}

s1f_status s1f_tier_wait(s1f_tier *tier, s1f_group *group, int64_t number)
{
    s1f_tier_load *known = find(tier, number);
    if (known == NULL)
        return s1f_fail(S1F_ERR_STATE, "load %lld is not out", (long long)number);
    S1F_TRY(tier->kind->wait(tier, group, known));
    known->is_awaited = 1;
    if (known->comes_in)
        forget(tier, known);
    return S1F_OK;
}

s1f_status s1f_tier_came_back(s1f_tier *tier, int64_t number, int64_t *ns)
{
    return tier->kind->came_back == NULL ? S1F_OK : tier->kind->came_back(tier, number, ns);
}

void s1f_tier_get_facts(s1f_tier *tier, s1f_tier_facts *out)
{
    tier->kind->get_facts(tier, out);
}

void s1f_tier_reset(s1f_tier *tier)
{
    tier->kind->reset(tier);
    while (tier->loads != NULL)
        forget(tier, tier->loads);
}

void s1f_tier_free(s1f_tier *tier)
{
    if (tier != NULL)
        tier->kind->free(tier);
}
