//! A stand-in for the crate `cubecl-llvm`, whose build script downloads an LLVM bundle.
//!
//! `cubecl-cuda` compiles kernels either through LLVM or, with its feature `cpp`, as CUDA C++ through NVRTC at run time. This
//! workspace takes the second way, which never calls what is here; but `cubecl-cuda` names these items either way. Compiling
//! through them is an error, never a panic.

use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_server::compiler::CompilationError;
use cubecl_server::kernel::BufferIOAttr;

/// The target of the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlvmTarget {
    /// NVIDIA's PTX.
    Nvptx,
}

/// The compiler that is not here.
#[derive(Clone, Debug)]
pub struct PlironCompiler {
    /// What it would compile for.
    pub target: LlvmTarget,
}

/// Options that nothing reads.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// AMD architecture.
    pub arch: Option<String>,
    /// NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// PTX version.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// How parameters are passed.
    pub grid_constants: bool,
}

/// What the compiler would make.
#[derive(Debug)]
#[non_exhaustive]
pub enum PlironArtifact {
    /// PTX.
    NvptxCode(NvptxModule),
}

/// A compiled kernel.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// Bytes of shared memory.
    pub shared_memory_size: usize,
    /// Its text.
    pub ir: String,
    /// Its PTX, ended by a zero.
    pub ptx: Vec<std::ffi::c_char>,
    /// Which buffers are read and written.
    pub io: Vec<BufferIOAttr>,
}

impl PlironCompiler {
    /// Always an error: see the crate's documentation.
    pub fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this build compiles CUDA kernels through NVRTC; cubecl-cuda's feature `cpp` must be on".into(),
            backtrace: Default::default(),
        })
    }

    /// Names the compiler in caches.
    pub fn lang_tag(&self) -> &'static str {
        "none"
    }
}

/// NVIDIA's part.
pub mod nvptx {
    /// Versions of PTX.
    pub mod ptx_version {
        use std::fmt;

        /// A version of PTX.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct PtxVersion(i32);

        impl PtxVersion {
            /// None: nothing here emits PTX.
            pub fn for_driver(_driver_version: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    }
}

/// What targets share.
pub mod shared {
    /// Features that the real crate cannot lower.
    pub mod lowered_features {
        /// A kind of device.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA's.
            Nvptx,
        }

        /// Nothing is restricted: CUDA C++ can express all of it.
        pub fn restrict_features<Properties>(_properties: &mut Properties, _target: GpuTarget) {}
    }
}
