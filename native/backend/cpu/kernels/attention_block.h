// What both ways of attention share: a block of query rows, and blocks of slots brought to f32.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/lanes.h"

REFLEX_ISA_BEGIN

constexpr int32_t kSlots = 32;       ///< slots of a block
constexpr int32_t kMaxRows = 32;     ///< query rows of a block: bits of a mask
constexpr float kLowest = -3.0e38f;  ///< below any score, yet finite: e^(-inf - kLowest) is 0

static inline int32_t round_up(int32_t n) { return (n + W - 1) / W * W; }

/// Query rows [first, first + count) and what they see.
struct RowBlock {
  int32_t first, count, longest = 0;
  int32_t prefix[kMaxRows];
  const int32_t* extra[kMaxRows];  ///< next slot of the row's branch
  const int32_t* extra_end[kMaxRows];
  RowBlock(const AttentionArgs& a, int32_t begin, int32_t n) : first(begin), count(n) {
    for (int32_t i = 0; i < n; ++i) {
      const int32_t r = a.row_of ? a.row_of[begin + i] : begin + i;
      prefix[i] = a.prefix[r];
      longest = prefix[i] > longest ? prefix[i] : longest;
      extra[i] = a.extra + a.extra_begin[r];
      extra_end[i] = a.extra + a.extra_begin[r + 1];
    }
  }
};

/// Up to kSlots slots: first, first + 1, ..., or listed with the rows that see each.
struct SlotBlock {
  int32_t n = 0, first = 0;
  const int32_t* slots = nullptr;
  const uint32_t* masks = nullptr;  ///< (n) bit i: row i of the RowBlock sees the slot; nullptr: by prefix
  int32_t slot(int32_t j) const { return slots ? slots[j] : first + j; }
};

template <bool F16>
static inline vf load_state(const uint8_t* base, size_t i) {
  if (F16) return load_f16(reinterpret_cast<const uint16_t*>(base) + i);
  return load(reinterpret_cast<const float*>(base) + i);
}

/// n values at value `at` of a state, as f32 and zero up to a whole vector.
template <bool F16>
static inline void widen(const uint8_t* base, size_t at, int32_t n, float* y) {
  int32_t i = 0;
  for (; i + W <= n; i += W) store(y + i, load_state<F16>(base, at + static_cast<size_t>(i)));
  if (i == n) return;
  uint8_t part[W * sizeof(float)] = {};
  const size_t size = F16 ? 2 : 4;
  memcpy(part, base + (at + static_cast<size_t>(i)) * size, static_cast<size_t>(n - i) * size);
  store(y + i, load_state<F16>(part, 0));
}

/// Asks for a slot's key and value to be brought from memory.
static inline void fetch_slot(const AttentionArgs& a, int32_t g, int32_t slot) {
  const size_t s = static_cast<size_t>(slot), size = a.f16 ? 2 : 4;
  const uint8_t* k = a.k + (s * a.ldk + static_cast<size_t>(g * a.head_dim)) * size;
  const uint8_t* v = a.v + (s * a.ldv + static_cast<size_t>(g * a.v_head_dim)) * size;
  for (size_t i = 0; i < static_cast<size_t>(a.head_dim) * size; i += 64) __builtin_prefetch(k + i, 0, 2);
  for (size_t i = 0; i < static_cast<size_t>(a.v_head_dim) * size; i += 64) __builtin_prefetch(v + i, 0, 2);
}

/// The next slots that any row's branch holds, ascending, and who sees them; at most kSlots.
static inline int32_t next_extras(RowBlock& rows, int32_t* slots, uint32_t* masks) {
  int32_t n = 0;
  for (; n < kSlots; ++n) {
    int32_t lowest = INT32_MAX;
    for (int32_t i = 0; i < rows.count; ++i)
      if (rows.extra[i] != rows.extra_end[i] && *rows.extra[i] < lowest) lowest = *rows.extra[i];
    if (lowest == INT32_MAX) break;
    slots[n] = lowest;
    masks[n] = 0;
    for (int32_t i = 0; i < rows.count; ++i)
      if (rows.extra[i] != rows.extra_end[i] && *rows.extra[i] == lowest) {
        masks[n] |= 1u << i;
        ++rows.extra[i];
      }
  }
  return n;
}

/// Calls fold(SlotBlock) on slots [begin, end), then, where asked, on the rows' branches.
template <class Fold>
static inline void for_slots(const RowBlock& rows, int32_t begin, int32_t end, bool branches, Fold fold) {
  SlotBlock b;
  for (b.first = begin; b.first < end; b.first += kSlots) {
    b.n = end - b.first < kSlots ? end - b.first : kSlots;
    fold(b);
  }
  if (!branches) return;
  RowBlock left = rows;
  int32_t slots[kSlots];
  uint32_t masks[kSlots];
  b.slots = slots;
  b.masks = masks;
  while ((b.n = next_extras(left, slots, masks)) > 0) fold(b);
}

/// Whether so few queries share a key head that lanes are better spent on dimensions.
static inline bool is_few(const AttentionArgs& a, int32_t rows) {
  return rows * (a.n_heads / a.n_kv_heads) <= W / 2;
}

size_t few_scratch(const AttentionArgs& a, int32_t rows);
/// Heads [g_begin, g_end): neighbours, for their keys lie together.
void attention_few(const AttentionArgs& a, const RowBlock& rows, int32_t g_begin, int32_t g_end,
                   float* scratch);

REFLEX_ISA_END
