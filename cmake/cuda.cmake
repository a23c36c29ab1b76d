# reflex_cuda: the CUDA backend where nvcc is found, else a stub that says so. Kernels are compiled
# ahead of time, one fatbin per .cu file, and linked into the library as bytes; the driver is opened
# at run time, so nothing here links against CUDA.
set(REFLEX_HAVE_CUDA OFF)
if(NOT REFLEX_CUDA STREQUAL "OFF")
  find_program(REFLEX_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin
               DOC "The CUDA compiler")
  set(reflex_no_cuda "")
  if(NOT REFLEX_NVCC)
    set(reflex_no_cuda "nvcc is not found")
  else()
    execute_process(COMMAND ${REFLEX_NVCC} --version OUTPUT_VARIABLE reflex_nvcc_text ERROR_QUIET)
    string(REGEX MATCH "V([0-9.]+)" reflex_nvcc_match "${reflex_nvcc_text}")
    set(reflex_nvcc_version "${CMAKE_MATCH_1}")
    if(NOT reflex_nvcc_match)
      set(reflex_no_cuda "${REFLEX_NVCC} does not tell its version")
    elseif(reflex_nvcc_version VERSION_LESS 12.0)
      set(reflex_no_cuda "${REFLEX_NVCC} is ${reflex_nvcc_version}, 12.0 or newer is needed (C++20)")
    endif()
  endif()
  if(NOT reflex_no_cuda)
    set(REFLEX_HAVE_CUDA ON)
  elseif(REFLEX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "REFLEX_CUDA=ON, but ${reflex_no_cuda} (set CUDA_HOME or REFLEX_NVCC)")
  else()
    message(STATUS "CUDA: ${reflex_no_cuda}, building for the CPU only")
  endif()
endif()
include(cmake/boot.cmake)

if(NOT REFLEX_HAVE_CUDA)
  add_library(reflex_cuda STATIC native/backend/no_cuda.cpp)
  target_link_libraries(reflex_cuda PUBLIC reflex_backend reflex_boot)
  return()
endif()

# ---- architectures ------------------------------------------------------------------------
# Machine code for each, PTX of the last for what comes after it. 90a is Hopper with its own
# instructions; every device of capability 9.0 runs it.
set(reflex_archs ${REFLEX_CUDA_ARCHS})
if(NOT reflex_archs)
  execute_process(COMMAND ${REFLEX_NVCC} --list-gpu-arch OUTPUT_VARIABLE reflex_known OUTPUT_STRIP_TRAILING_WHITESPACE)
  foreach(arch 75 80 86 89 90a 100 120)
    string(REGEX REPLACE "a$" "" plain ${arch})
    if(reflex_known MATCHES "compute_${plain}(\n|$)")
      list(APPEND reflex_archs ${arch})
    endif()
  endforeach()
endif()
list(SORT reflex_archs COMPARE NATURAL)  # in whatever order they were given: the last is the newest
set(reflex_gencode)
foreach(arch ${reflex_archs})
  list(APPEND reflex_gencode -gencode arch=compute_${arch},code=sm_${arch})
endforeach()
list(GET reflex_archs -1 reflex_newest)
list(APPEND reflex_gencode -gencode arch=compute_${reflex_newest},code=compute_${reflex_newest})
list(JOIN reflex_archs " " reflex_arch_text)
message(STATUS "CUDA: nvcc ${reflex_nvcc_version}, kernels for ${reflex_arch_text}")

# The driver's header is all that C++ needs of the toolkit. nvcc may be a wrapper: it knows its home.
execute_process(COMMAND ${REFLEX_NVCC} --dryrun -x cu /dev/null --cubin -o /dev/null ERROR_VARIABLE reflex_dryrun
                OUTPUT_QUIET)
string(REGEX MATCH "TOP=([^\n]*)" reflex_top "${reflex_dryrun}")
set(reflex_top "${CMAKE_MATCH_1}")
find_path(REFLEX_CUDA_INCLUDE cuda.h HINTS ${reflex_top} ENV CUDA_HOME
          PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include REQUIRED)

# ---- kernels ------------------------------------------------------------------------------
# No -use_fast_math: results are the same on every build. Uncompressed: decompressing costs more of a
# cold start than reading.
set(reflex_nvcc_flags -std=c++20 -O3 -I${CMAKE_SOURCE_DIR}/native --expt-relaxed-constexpr --Werror all-warnings
    -diag-suppress 445)
execute_process(COMMAND ${REFLEX_NVCC} --help OUTPUT_VARIABLE reflex_nvcc_help)
if(reflex_nvcc_help MATCHES "--compress-mode")
  list(APPEND reflex_nvcc_flags --compress-mode=none)
endif()
file(GLOB reflex_kernels CONFIGURE_DEPENDS native/backend/cuda/*.cu)
file(GLOB reflex_kernel_headers CONFIGURE_DEPENDS native/backend/cuda/*.cuh native/backend/cuda/*params.h
     native/backend/cuda/tile.h native/quant/*.h native/quant/types.def)
set(reflex_images ${CMAKE_BINARY_DIR}/cuda)
set(reflex_fatbins)
set(REFLEX_IMAGE_BYTES "")
set(REFLEX_IMAGE_DECLARATIONS "")
set(REFLEX_IMAGE_TABLE "")
foreach(source ${reflex_kernels})
  get_filename_component(stem ${source} NAME_WE)
  set(fatbin ${reflex_images}/${stem}.fatbin)
  add_custom_command(
    OUTPUT ${fatbin}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${reflex_images}
    COMMAND ${REFLEX_NVCC} ${reflex_nvcc_flags} ${reflex_gencode} --fatbin ${source} -o ${fatbin}
    DEPENDS ${source} ${reflex_kernel_headers}
    COMMENT "CUDA ${stem}" VERBATIM)
  list(APPEND reflex_fatbins ${fatbin})
  string(APPEND REFLEX_IMAGE_BYTES "REFLEX_IMAGE(${stem}, \"${fatbin}\")\n")
  string(APPEND REFLEX_IMAGE_TABLE "    {\"${stem}\", reflex_image_${stem}, reflex_image_${stem}_end},\n")
endforeach()
list(LENGTH reflex_kernels REFLEX_IMAGE_COUNT)
configure_file(cmake/images.cpp.in ${reflex_images}/images.cpp @ONLY)
set_source_files_properties(${reflex_images}/images.cpp PROPERTIES OBJECT_DEPENDS "${reflex_fatbins}")

file(GLOB reflex_cuda_sources CONFIGURE_DEPENDS native/backend/cuda/*.cpp)
add_library(reflex_cuda STATIC ${reflex_cuda_sources} ${reflex_images}/images.cpp)
target_include_directories(reflex_cuda SYSTEM PRIVATE ${REFLEX_CUDA_INCLUDE})
target_link_libraries(reflex_cuda PUBLIC reflex_backend reflex_boot)

# cuda_tests: this backend's native tests alone, for tests/gpu/check.sh and its sanitizers.
if(REFLEX_TESTS)
  file(GLOB reflex_cuda_tests CONFIGURE_DEPENDS tests/native/test_cuda_*.cpp)
  add_executable(cuda_tests EXCLUDE_FROM_ALL tests/native/main.cpp ${reflex_cuda_tests})
  target_include_directories(cuda_tests PRIVATE tests/native)
  target_link_libraries(cuda_tests PRIVATE reflex_cuda reflex_cpu)
  # cmake --build build --target cuda_bench: the backend against the card's roofs.
  add_executable(cuda_bench EXCLUDE_FROM_ALL tests/bench/cuda_bench.cpp)
  target_link_libraries(cuda_bench PRIVATE reflex_models reflex_tokenizer reflex_cuda)
endif()
