// Monotonic time, and the moment the kernel says this process began.
#pragma once
#include <cstdint>

namespace reflex {

/// Milliseconds on CLOCK_BOOTTIME, the clock that /proc/self/stat's starttime counts on.
double now_ms();

/// CLOCK_BOOTTIME milliseconds at which this process was started, by the kernel's record
/// (10 ms ticks); the time of the first call where /proc cannot be read.
double process_start_ms();

}  // namespace reflex
