// Matrix products of this instruction set; the contract is MatmulArgs and Form in kernels.h.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/isa_namespace.h"

REFLEX_ISA_BEGIN

Form choose_form(uint32_t type, int32_t n_in, int32_t n_rows, bool exact);
size_t act_bytes(Form form, int32_t n_in, int32_t n_rows);
int32_t act_unit(Form form);
void prepare(Form form, const float* x, size_t ldx, int32_t n_in, int32_t n_rows, int32_t begin, int32_t end,
             uint8_t* act);
const uint8_t* act_row(Form form, const uint8_t* act, int32_t n_in, int32_t r);
size_t matmul_scratch(int32_t n_in, int32_t n_rows);
void matmul(const MatmulArgs& args, int32_t begin, int32_t end);

REFLEX_ISA_END
