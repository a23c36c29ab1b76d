# reflex_cuda: the CUDA backend where nvcc is found, else a stub that says so. Kernels are compiled
# ahead of time, one fatbin per .cu file, and linked into the library as bytes; the driver is opened
# at run time, so nothing here links against CUDA.
set(REFLEX_HAVE_CUDA OFF)
if(NOT REFLEX_CUDA STREQUAL "OFF")
  find_program(REFLEX_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin
               DOC "The CUDA compiler")
  if(REFLEX_NVCC)
    set(REFLEX_HAVE_CUDA ON)
  elseif(REFLEX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "REFLEX_CUDA=ON, but nvcc is not found (set CUDA_HOME or REFLEX_NVCC)")
  else()
    message(STATUS "CUDA: nvcc is not found, building for the CPU only")
  endif()
endif()
include(cmake/boot.cmake)

if(NOT REFLEX_HAVE_CUDA)
  add_library(reflex_cuda STATIC native/backend/no_cuda.cpp)
  target_link_libraries(reflex_cuda PUBLIC reflex_backend)
  return()
endif()

add_library(reflex_cuda STATIC native/backend/no_cuda.cpp)
target_link_libraries(reflex_cuda PUBLIC reflex_backend reflex_boot)
