# reflex_cpu: the CPU backend; kernels are compiled once per instruction set, each in its own
# namespace, and chosen at run time.
file(GLOB reflex_cpu_sources CONFIGURE_DEPENDS native/backend/cpu/*.cpp)
add_library(reflex_cpu STATIC ${reflex_cpu_sources})
target_link_libraries(reflex_cpu PUBLIC reflex_backend)
