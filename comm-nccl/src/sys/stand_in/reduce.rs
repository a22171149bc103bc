//! Reductions, element by element.

use std::ffi::c_int;

use half::{bf16, f16};

/// What the parts of all ranks come to, of type `dtype` by `op`, both in NCCL's numbers.
pub(super) fn reduced(dtype: c_int, op: c_int, parts: &[&[u8]]) -> Vec<u8> {
    macro_rules! integers {
        ($type:ty, $wide:ty) => {
            fold::<$type, $type>(
                parts,
                |part| part,
                |a, b| match op {
                    1 => a.wrapping_mul(b),
                    2 => a.max(b),
                    3 => a.min(b),
                    _ => a.wrapping_add(b),
                },
                |sum, ranks| if op == 4 { ((sum as $wide) / (ranks as $wide)) as $type } else { sum },
            )
        };
    }
    macro_rules! floats {
        ($type:ty, $wide:ty, $widen:expr, $round:expr) => {
            fold::<$type, $wide>(
                parts,
                $widen,
                |a, b| match op {
                    1 => a * b,
                    2 => {
                        if a.is_nan() || a > b {
                            a
                        } else {
                            b
                        }
                    }
                    3 => {
                        if a.is_nan() || a < b {
                            a
                        } else {
                            b
                        }
                    }
                    _ => a + b,
                },
                |sum, ranks| $round(if op == 4 { sum / ranks as $wide } else { sum }),
            )
        };
    }
    match dtype {
        0 => integers!(i8, i64),
        1 => integers!(u8, u64),
        2 => integers!(i32, i64),
        3 => integers!(u32, u64),
        4 => integers!(i64, i64),
        5 => integers!(u64, u64),
        6 => floats!(f16, f32, f16::to_f32, f16::from_f32),
        7 => floats!(f32, f32, |part| part, |sum| sum),
        8 => floats!(f64, f64, |part| part, |sum| sum),
        _ => floats!(bf16, f32, bf16::to_f32, bf16::from_f32),
    }
}

/// Element by element in rank order.
fn fold<T: Copy + FromBytes, W: Copy>(
    parts: &[&[u8]],
    widen: impl Fn(T) -> W,
    combine: impl Fn(W, W) -> W,
    end: impl Fn(W, usize) -> T,
) -> Vec<u8> {
    let width = size_of::<T>();
    let count = parts.first().map_or(0, |part| part.len() / width);
    let mut out = Vec::with_capacity(count * width);
    for index in 0..count {
        let mut of_ranks = parts.iter().map(|part| widen(T::read(&part[index * width..])));
        let Some(first) = of_ranks.next() else { break };
        let all = of_ranks.fold(first, &combine);
        end(all, parts.len()).write(&mut out);
    }
    out
}

/// Numbers in the machine's own order of bytes.
trait FromBytes {
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut Vec<u8>);
}

macro_rules! from_bytes {
    ($($type:ty),*) => {$(
        impl FromBytes for $type {
            fn read(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(std::array::from_fn(|index| bytes[index]))
            }

            fn write(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_ne_bytes());
            }
        }
    )*};
}

from_bytes!(i8, u8, i32, u32, i64, u64, f16, bf16, f32, f64);

/// Multiplies what a rank gives by its factor, a value of the type.
pub(super) fn scale(dtype: c_int, bytes: &mut Vec<u8>, factor: [u8; 8]) {
    let product = 1;
    let factors = factor[..size(dtype)].repeat(bytes.len() / size(dtype));
    *bytes = reduced(dtype, product, &[bytes, &factors]);
}

pub(super) fn size(dtype: c_int) -> usize {
    match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        _ => 8,
    }
}
