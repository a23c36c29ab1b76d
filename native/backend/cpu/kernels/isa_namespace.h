// The namespace of the instruction set that this translation unit is compiled for.
//
// Every file in kernels/ is compiled once per set (cmake/cpu.cmake) with REFLEX_ISA set to the
// set's name. All that a kernel file defines is inside REFLEX_ISA_BEGIN .. REFLEX_ISA_END, and it
// includes no header that defines inline functions elsewhere: the linker keeps one copy of an
// inline function, and a copy built for AVX-512 would kill the process on a lesser machine.
#pragma once

#ifndef REFLEX_ISA
#error "kernel files are compiled through cmake/cpu.cmake, which names the instruction set"
#endif

#define REFLEX_ISA_BEGIN  \
  namespace reflex::cpu { \
  namespace REFLEX_ISA {
#define REFLEX_ISA_END \
  }                    \
  }

/// Before a loop over registers: unrolled whole, or its array would live in memory.
#if defined(__clang__)
#define REFLEX_UNROLL _Pragma("unroll")
#else
#define REFLEX_UNROLL _Pragma("GCC unroll 16")
#endif
