# The compiler of CUDA kernels, and the runtime library that torch uses, too, as the imported target `shardproof::cudart`. Sets
# SHARDPROOF_CUDA_FOUND; without it the parts that need a GPU say at run time that they are not there.
#
# CMake's CUDA language is not enabled: it asks for a toolkit in one piece, and torch's wheel brings only its libraries. The
# compiler is found in .venv (ci/setup puts it there, from PyPI), where -DSHARDPROOF_NVCC=FILE says, or on the PATH.
option(SHARDPROOF_CUDA "Build the CUDA parts where a compiler is found" ON)
set(SHARDPROOF_CUDA_ARCHITECTURES "80;90" CACHE STRING "Compute capabilities to compile for; the last one as PTX, too")

set(SHARDPROOF_CUDA_FOUND FALSE)
if(SHARDPROOF_CUDA)
  file(GLOB _cuda_wheels "${SHARDPROOF_VENV}/lib/python3.*/site-packages/nvidia/cu13")
  find_program(SHARDPROOF_NVCC nvcc HINTS "${_cuda_wheels}/bin" PATHS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
  # The runtime is torch's own where its wheel brings one, else that of the compiler's toolkit.
  cmake_path(GET SHARDPROOF_NVCC PARENT_PATH _cuda_bin)
  set(_cuda_places "${_cuda_wheels}" "${_cuda_bin}/..")
  find_file(SHARDPROOF_CUDART NAMES libcudart.so.13 PATHS ${_cuda_places} PATH_SUFFIXES lib lib64 NO_DEFAULT_PATH)
  find_path(SHARDPROOF_CUDA_INCLUDE cuda_runtime.h PATHS ${_cuda_places} PATH_SUFFIXES include NO_DEFAULT_PATH)
endif()
if(NOT SHARDPROOF_CUDA)
  message(STATUS "[CUDA] left out: SHARDPROOF_CUDA is off")
elseif(NOT SHARDPROOF_NVCC OR NOT SHARDPROOF_CUDART OR NOT SHARDPROOF_CUDA_INCLUDE)
  message(STATUS "[CUDA] no compiler or no runtime in .venv: left out (ci/setup installs both)")
else()
  execute_process(COMMAND "${SHARDPROOF_NVCC}" --version OUTPUT_VARIABLE _nvcc_version COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" _ "${_nvcc_version}")
  if(CMAKE_MATCH_1 EQUAL 13)
    set(SHARDPROOF_CUDA_FOUND TRUE)
    message(STATUS "[CUDA] ${SHARDPROOF_NVCC}, release ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}, for ${SHARDPROOF_CUDA_ARCHITECTURES}")
  else()
    message(STATUS "[CUDA] left out: ${SHARDPROOF_NVCC} is release ${CMAKE_MATCH_1}, and torch's runtime is 13")
  endif()
endif()

if(SHARDPROOF_CUDA_FOUND)
  add_library(shardproof_cudart INTERFACE)
  add_library(shardproof::cudart ALIAS shardproof_cudart)
  target_include_directories(shardproof_cudart SYSTEM INTERFACE "${SHARDPROOF_CUDA_INCLUDE}")
  target_link_libraries(shardproof_cudart INTERFACE "${SHARDPROOF_CUDART}")
endif()

# Contraction into fused multiply-adds and approximate divisions would give other bits than the CPU's loops. Uncompressed, the
# code can be read out of the library (ci/tests/kernels_ptx_test.py).
set(_cuda_flags -std=c++20 -O3 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false -no-compress --threads 0
  -Xcompiler -fPIC,-Wall)
set(_cuda_last "")
foreach(_architecture IN LISTS SHARDPROOF_CUDA_ARCHITECTURES)
  list(APPEND _cuda_flags -gencode "arch=compute_${_architecture},code=sm_${_architecture}")
  set(_cuda_last "${_architecture}")
endforeach()
list(APPEND _cuda_flags -gencode "arch=compute_${_cuda_last},code=compute_${_cuda_last}")

# shardproof_cuda_source(TARGET FILE.cu INCLUDE_DIRECTORY...): compiles a source that sees no Torch header into the target.
function(shardproof_cuda_source target source)
  get_filename_component(_name "${source}" NAME)
  set(_object "${CMAKE_CURRENT_BINARY_DIR}/${target}.${_name}.o")
  set(_includes "")
  foreach(_directory IN LISTS ARGN)
    list(APPEND _includes "-I${_directory}")
  endforeach()
  add_custom_command(OUTPUT "${_object}"
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} "${SHARDPROOF_NVCC}" -c ${_cuda_flags} ${_includes} -isystem
      "${SHARDPROOF_CUDA_INCLUDE}" -MD -MF "${_object}.d" "${CMAKE_CURRENT_SOURCE_DIR}/${source}" -o "${_object}"
    DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${source}" DEPFILE "${_object}.d" COMMENT "Building CUDA object ${_name}" VERBATIM)
  target_sources(${target} PRIVATE "${_object}")
  set_source_files_properties("${_object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
endfunction()
