//! Which kernels multiply matrices on the processor.

use std::fmt;

use serde::Serialize;

/// Instruction sets for which the crate `gemm`, which multiplies matrices on the processor, has kernels of f32; the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MatrixKernels {
    /// Compiled for what every processor of the architecture has.
    Portable,
    /// Four numbers at a time, on Arm.
    Neon,
    /// Eight numbers at a time.
    Avx2,
    /// Sixteen numbers at a time.
    Avx512,
}

/// The kernels that run here, and the best that would.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MatrixProducts {
    /// Those that run.
    pub in_use: MatrixKernels,
    /// The best that this processor could run.
    pub best: MatrixKernels,
}

/// Whether this build has the kernels of AVX-512.
const HAS_AVX512_KERNELS: bool = cfg!(feature = "x86-v4");

impl MatrixProducts {
    /// Those of this processor and this build.
    #[must_use]
    pub fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        let found =
            Self::choose(is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("fma"), HAS_AVX512_KERNELS);
        #[cfg(target_arch = "aarch64")]
        let found = Self::only(if std::arch::is_aarch64_feature_detected!("neon") {
            MatrixKernels::Neon
        } else {
            MatrixKernels::Portable
        });
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let found = Self::only(MatrixKernels::Portable);
        found
    }

    /// As `gemm` 0.19 chooses on x86 when it multiplies for the first time.
    #[cfg(any(target_arch = "x86_64", test))]
    fn choose(avx512: bool, fma: bool, has_avx512_kernels: bool) -> Self {
        let without = if fma { MatrixKernels::Avx2 } else { MatrixKernels::Portable };
        let best = if avx512 { MatrixKernels::Avx512 } else { without };
        MatrixProducts { in_use: if has_avx512_kernels { best } else { without }, best }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn only(kernels: MatrixKernels) -> Self {
        MatrixProducts { in_use: kernels, best: kernels }
    }
}

impl fmt::Display for MatrixKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MatrixKernels::Portable => "portable code",
            MatrixKernels::Neon => "NEON",
            MatrixKernels::Avx2 => "AVX2 and FMA",
            MatrixKernels::Avx512 => "AVX-512",
        })
    }
}

impl fmt::Display for MatrixProducts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MatrixProducts { in_use, best } = self;
        write!(f, "matrix products by {in_use}")?;
        if best > in_use {
            write!(f, "; this processor supports {best}, which is faster: build with the feature x86-v4")
        } else {
            f.write_str(", the best that there is for this processor")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_are_those_of_the_processor_that_the_build_has() {
        use MatrixKernels::{Avx2, Avx512, Portable};
        for (avx512, fma, built, in_use, best) in [
            (true, true, true, Avx512, Avx512),
            (true, true, false, Avx2, Avx512),
            (false, true, true, Avx2, Avx2),
            (false, false, true, Portable, Portable),
        ] {
            let products = MatrixProducts::choose(avx512, fma, built);
            assert_eq!(products, MatrixProducts { in_use, best });
            assert_eq!(products.to_string().contains("build with the feature x86-v4"), in_use != best, "{products}");
        }
    }

    #[test]
    #[cfg(feature = "x86-v4")]
    fn the_default_build_leaves_nothing_unused() {
        let products = MatrixProducts::here();
        assert_eq!(products.in_use, products.best);
    }
}
