// Attention of this instruction set; the contract is AttentionArgs in kernels.h.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/isa_namespace.h"

REFLEX_ISA_BEGIN

size_t attention_scratch(const AttentionArgs& a, int32_t q_rows);
void attention(const AttentionArgs& a, int32_t q_begin, int32_t q_end, int32_t kv_head, float* scratch);

REFLEX_ISA_END
