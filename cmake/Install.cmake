# `cmake --install build --prefix DIR`: the library, its headers, the harness, and what find_package(shardproof) needs. LibTorch
# stays where it is: the environment that this build used, or another that the user names by SHARDPROOF_VENV.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/shardproof")
set(_libraries shardproof shardproof_mpi shardproof_nccl shardproof_cuda golden harness)
set_target_properties(${_libraries} PROPERTIES INSTALL_RPATH "$ORIGIN;${SHARDPROOF_TORCH_DIR}/lib"
  INSTALL_RPATH_USE_LINK_PATH ON)
foreach(part mpi nccl cuda)
  set_target_properties(shardproof_${part} PROPERTIES EXPORT_NAME ${part})
endforeach()
set_target_properties(golden PROPERTIES OUTPUT_NAME shardproof_golden)
target_compile_features(shardproof INTERFACE cxx_std_20)
add_custom_target(shardproof_installed DEPENDS ${_libraries})  # all that an installation takes

install(TARGETS ${_libraries} EXPORT shardproof LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/impl/include/shardproof" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")

# The harness as a library, so that programs verify strategies and properties of their own (docs/extending.md). Of its headers
# those that such a program includes, in a folder that only shardproof::harness names.
set(_harness "${CMAKE_INSTALL_INCLUDEDIR}/shardproof_harness")
target_include_directories(harness INTERFACE "$<INSTALL_INTERFACE:${_harness}>")
foreach(header golden/golden.h harness/case/axes.h harness/case/case.h harness/case/case_options.h
    harness/case/case_scanner.h harness/case/interleaving.h harness/commands/program.h
    harness/compare/step_exchange.h harness/run/property.h)
  cmake_path(GET header PARENT_PATH _folder)
  install(FILES "${PROJECT_SOURCE_DIR}/${header}" DESTINATION "${_harness}/${_folder}")
endforeach()
if(TARGET golden_python)
  install(TARGETS golden_python LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  add_dependencies(shardproof_installed golden_python)
endif()

if(TARGET shardproof_cuda_graph)  # loaded, and linked by nobody
  set_target_properties(shardproof_cuda_graph PROPERTIES INSTALL_RPATH "$ORIGIN;${SHARDPROOF_TORCH_DIR}/lib"
    INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS shardproof_cuda_graph LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  add_dependencies(shardproof_installed shardproof_cuda_graph)
endif()

install(EXPORT shardproof NAMESPACE shardproof:: FILE shardproofTargets.cmake DESTINATION "${_package}")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/shardproofConfig.cmake.in"
  "${CMAKE_BINARY_DIR}/shardproofConfig.cmake" INSTALL_DESTINATION "${_package}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/shardproofConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/shardproofConfig.cmake" "${CMAKE_BINARY_DIR}/shardproofConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/LibTorch.cmake" DESTINATION "${_package}")
