// The row-wise kernels of this instruction set; what each computes is said in kernels.h.
#pragma once
#include <stdint.h>

#include "backend/cpu/kernels/isa_namespace.h"

REFLEX_ISA_BEGIN

void rms_norm_rows(const float* x, const float* w, float eps, int32_t group, int32_t n, int32_t rows,
                   float* y);
void rope(float* x, const float* cs, int32_t n_heads, int32_t head_dim, int32_t n_rot, bool adjacent);
void add(const float* a, const float* b, int32_t n, float* y);
void swiglu(const float* gate, const float* up, int32_t n, float* y);
void to_f16(const float* x, int32_t n, uint16_t* y);
float max_value(const float* x, int32_t n);
double sum_exp(const float* x, int32_t n, float shift);
void exp_scaled(const float* x, int32_t n, float shift, float scale, float* y);

REFLEX_ISA_END
