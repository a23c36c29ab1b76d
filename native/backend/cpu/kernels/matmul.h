// Matrix products of this instruction set; the contract is MatmulArgs and Form in kernels.h.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/isa_namespace.h"

REFLEX_ISA_BEGIN

Form choose_form(uint32_t type, int32_t n_in, int32_t n_rows, bool exact);
size_t matmul_scratch(int32_t n_in, int32_t n_rows);
void matmul(const MatmulArgs& args, int32_t begin, int32_t end);

REFLEX_ISA_END
