#define REFLEX_ISA test_isa
#include "test_quant_set.h"

#include "quant/int8_form.h"

test_set::Unpack* const test_set::unpack = &reflex::quant::test_isa::unpack_int8;
