// Attention of this instruction set; the contract is AttentionArgs in kernels.h.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/isa_namespace.h"

REFLEX_ISA_BEGIN

size_t attention_scratch(const AttentionArgs& a, int32_t q_rows);
void attention(const AttentionArgs& a, int32_t q_begin, int32_t q_end, int32_t g_begin, int32_t g_end,
               float* scratch);
size_t attention_part_floats(const AttentionArgs& a, int32_t rows);
void attention_part(const AttentionArgs& a, int32_t n_rows, int32_t begin, int32_t end, bool last,
                    float* part, float* scratch);
void attention_merge(const AttentionArgs& a, int32_t n_rows, int32_t kv_head, float* parts, int32_t n_parts);

REFLEX_ISA_END
