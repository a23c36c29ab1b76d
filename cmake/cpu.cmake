# reflex_cpu: the CPU backend. Its kernels (backend/cpu/kernels) are compiled once per instruction
# set, each in a namespace of the set's name, and chosen at run time by cpuid.
file(GLOB reflex_cpu_sources CONFIGURE_DEPENDS native/backend/cpu/*.cpp)
file(GLOB reflex_cpu_kernels CONFIGURE_DEPENDS native/backend/cpu/kernels/*.cpp)

add_library(reflex_cpu STATIC ${reflex_cpu_sources})
target_link_libraries(reflex_cpu PUBLIC reflex_backend)

# reflex_cpu_kernel_set(NAME FLAGS...): the kernels once more, for the set NAME.
function(reflex_cpu_kernel_set name)
  add_library(reflex_cpu_${name} OBJECT ${reflex_cpu_kernels})
  target_link_libraries(reflex_cpu_${name} PUBLIC reflex_flags)
  target_compile_definitions(reflex_cpu_${name} PRIVATE REFLEX_ISA=${name})
  # gcc 12's own AVX-512 header starts its "undefined" registers from themselves.
  target_compile_options(reflex_cpu_${name} PRIVATE ${ARGN}
                         $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized -Wno-maybe-uninitialized>)
  target_sources(reflex_cpu PRIVATE $<TARGET_OBJECTS:reflex_cpu_${name}>)
  if(REFLEX_TESTS AND CMAKE_NM AND NOT REFLEX_SANITIZE)
    add_test(NAME kernel_symbols_${name}
             COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DSET=${name}
                     "-DOBJECTS=$<JOIN:$<TARGET_OBJECTS:reflex_cpu_${name}>,,>"
                     -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/check_kernel_symbols.cmake)
  endif()
  target_compile_definitions(reflex_cpu PRIVATE REFLEX_CPU_HAS_${name}=1)
endfunction()

reflex_cpu_kernel_set(portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  reflex_cpu_kernel_set(avx2 -mavx2 -mfma -mf16c)
  reflex_cpu_kernel_set(avx512vnni -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq
                        -mavx512vnni -mprefer-vector-width=512)
endif()

# cmake --build build --target cpu_bench: the backend against the machine's roofs.
if(REFLEX_TESTS)
  add_executable(cpu_bench EXCLUDE_FROM_ALL tests/bench/cpu_bench.cpp)
  target_link_libraries(cpu_bench PRIVATE reflex_models reflex_cpu)
endif()
