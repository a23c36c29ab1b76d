// Q5_1: 32 values, 5 bits, scale and minimum.    value = d * q + m
#pragma once
#include "quant/q5_0.h"

REFLEX_QUANT_BEGIN

struct Q5_1 {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = true;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    Half m;
    uint8_t qh[4];
    uint8_t qs[16];  ///< as in Q5_0
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float* min) {
    unpack_5bit(b.qh, b.qs, 0, q);
    scale[0] = scale[1] = to_float(b.d);
    min[0] = min[1] = to_float(b.m);
  }
};

REFLEX_QUANT_END
