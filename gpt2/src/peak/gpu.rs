//! Peaks of GPUs, as NVIDIA's data sheets have them.

use crate::precision::Precision;

/// TFLOP/s of dense products, without the doubling by structured sparsity that data sheets print first.
struct Peaks {
    /// Outside of the tensor cores.
    f32: f64,
    /// `None` before Ampere.
    tf32: Option<f64>,
    /// `None` before Ampere.
    bf16: Option<f64>,
    /// With sums in f32.
    f16: f64,
}

const fn ampere_or_newer(f32: f64, tf32: f64, bf16: f64) -> Peaks {
    Peaks { f32, tf32: Some(tf32), bf16: Some(bf16), f16: bf16 }
}

const fn older(f32: f64, f16: f64) -> Peaks {
    Peaks { f32, tf32: None, bf16: None, f16 }
}

/// Names as the driver gives them; the first that a device's name begins with counts, so longer names come first.
const TABLE: [(&str, Peaks); 22] = [
    // NVIDIA H200 Tensor Core GPU data sheet (2024).
    ("NVIDIA H200 NVL", ampere_or_newer(60.0, 417.5, 835.5)),
    ("NVIDIA H200", ampere_or_newer(67.0, 494.5, 989.5)),
    // NVIDIA H100 Tensor Core GPU data sheet (2023, 2024).
    ("NVIDIA H100 NVL", ampere_or_newer(60.0, 417.5, 835.5)),
    ("NVIDIA H100 PCIe", ampere_or_newer(51.0, 378.0, 756.5)),
    ("NVIDIA H100 80GB HBM3", ampere_or_newer(67.0, 494.5, 989.5)),
    // NVIDIA A100 Tensor Core GPU data sheet (2021): the same for SXM and PCIe.
    ("NVIDIA A100", ampere_or_newer(19.5, 156.0, 312.0)),
    ("A100-", ampere_or_newer(19.5, 156.0, 312.0)),
    // NVIDIA A30, A10 and A40 data sheets (2021, 2022).
    ("NVIDIA A30", ampere_or_newer(10.3, 82.0, 165.0)),
    ("NVIDIA A40", ampere_or_newer(37.4, 74.8, 149.7)),
    ("NVIDIA A10", ampere_or_newer(31.2, 62.5, 125.0)),
    // NVIDIA RTX A6000 data sheet (2021), and the white paper of Ampere GA102.
    ("NVIDIA RTX A6000", ampere_or_newer(38.7, 77.4, 154.8)),
    // NVIDIA L4, L40 and L40S data sheets (2023).
    ("NVIDIA L40S", ampere_or_newer(91.6, 183.0, 362.05)),
    ("NVIDIA L40", ampere_or_newer(90.5, 90.5, 181.05)),
    ("NVIDIA L4", ampere_or_newer(30.3, 60.0, 121.0)),
    // White papers of Ampere GA102 and of Ada, whose GeForce cards sum in f32 at half the rate.
    ("NVIDIA GeForce RTX 3090 Ti", ampere_or_newer(40.0, 40.0, 80.0)),
    ("NVIDIA GeForce RTX 3090", ampere_or_newer(35.6, 35.6, 71.0)),
    ("NVIDIA GeForce RTX 4090", ampere_or_newer(82.6, 82.6, 165.2)),
    // NVIDIA V100 data sheet (2020).
    ("Tesla V100-SXM2", older(15.7, 125.0)),
    ("Tesla V100-SXM3", older(16.4, 130.0)),
    ("Tesla V100S-PCIE", older(16.4, 130.0)),
    ("Tesla V100-PCIE", older(14.0, 112.0)),
    // NVIDIA T4 data sheet (2018).
    ("Tesla T4", older(8.1, 65.0)),
];

/// FLOP/s of dense products on the CUDA device of this name, computing in `precision`, and in words what they are. Products of f32 run in TF32 where
/// the device has it, as the backend has them.
///
/// # Errors
/// Why they are not known.
pub(super) fn flops(name: &str, precision: Precision) -> Result<(f64, &'static str), String> {
    let unknown = || format!("this program has no data sheet of '{name}'");
    let (_, peaks) = TABLE.iter().find(|(start, _)| begins_with(name, start)).ok_or_else(unknown)?;
    let (tflops, what) = match precision {
        Precision::F32 => peaks.tf32.map_or((Some(peaks.f32), "f32"), |tf32| (Some(tf32), "TF32")),
        Precision::Bf16 => (peaks.bf16, "bf16"),
        Precision::F16 => (Some(peaks.f16), "f16"),
    };
    let tflops = tflops.ok_or_else(|| format!("'{name}' has no matrix units for {what}"))?;
    Ok((tflops * 1e12, what))
}

/// Whether `start` is the whole name or ends where a word of it does: `NVIDIA L4` is no `NVIDIA L40`.
fn begins_with(name: &str, start: &str) -> bool {
    let rest = name.strip_prefix(start);
    rest.is_some_and(|rest| start.ends_with('-') || !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_dense_products() {
        let of = |name: &str, precision| flops(name, precision).map(|(flops, what)| (flops / 1e12, what));
        assert_eq!(of("NVIDIA H100 80GB HBM3", Precision::Bf16), Ok((989.5, "bf16")));
        assert_eq!(of("NVIDIA H100 80GB HBM3", Precision::F32), Ok((494.5, "TF32")));
        assert_eq!(of("NVIDIA H200", Precision::F16), Ok((989.5, "f16")));
        assert_eq!(of("NVIDIA A100-SXM4-80GB", Precision::F32), Ok((156.0, "TF32")));
        assert_eq!(of("A100-PCIE-40GB", Precision::Bf16), Ok((312.0, "bf16")));
        assert_eq!(of("NVIDIA L4", Precision::Bf16), Ok((121.0, "bf16")));
        assert_eq!(of("NVIDIA L40S", Precision::Bf16), Ok((362.05, "bf16")));
        assert_eq!(of("Tesla V100-SXM2-16GB", Precision::F32), Ok((15.7, "f32")));
    }

    #[test]
    fn what_is_not_known_is_said_and_not_guessed() {
        for name in ["NVIDIA A10G", "NVIDIA L400", "NVIDIA H100", "Quadro P400", ""] {
            let why = flops(name, Precision::F32).unwrap_err();
            assert!(why.contains(&format!("'{name}'")), "{why}");
        }
        let why = flops("Tesla T4", Precision::Bf16).unwrap_err();
        assert!(why.contains("no matrix units for bf16"), "{why}");
    }
}
