//! Arithmetic on flat vectors, where they are.

use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, TensorData};
use comm_core::Result;

use super::{Flat, joined, misplaced};
use crate::precision::Precision;

impl Flat {
    /// `self + factor·other`, element by element, in f32.
    pub(crate) fn plus_scaled(self, factor: f32, other: &Flat) -> Result<Flat> {
        match (self.apart(), other) {
            (Flat::Host(mut sum), values @ (Flat::Host(_) | Flat::Part(..))) if sum.len() == values.len() => {
                sum.iter_mut().zip(values.host()?).for_each(|(sum, value)| *sum += factor * value);
                Ok(Flat::Host(sum))
            }
            (sum @ Flat::Device(_), Flat::Device(_)) => {
                let sum = sum.into_tensor()?.zip(other.clone().into_tensor()?);
                Ok(Flat::Device(sum.map(|(sum, value)| sum + value.mul_scalar(factor)).into_iter().collect()))
            }
            _ => Err(misplaced()),
        }
    }

    /// Copies of the elements at `indices`.
    pub(crate) fn take_at(&self, indices: &[usize]) -> Flat {
        match self {
            Flat::Host(values) => Flat::Host(indices.iter().map(|index| values[*index]).collect()),
            Flat::Part(whole, range) => {
                let values = &whole[range.clone()];
                Flat::Host(indices.iter().map(|index| values[*index]).collect())
            }
            Flat::Device(parts) => match joined(parts.clone(), Precision::F32) {
                Some(whole) if !indices.is_empty() => {
                    let at = positions(indices, &whole.device());
                    Flat::Device(vec![whole.select(0, at)])
                }
                _ => Flat::Device(Vec::new()),
            },
        }
    }

    /// The same with `values` in the place of the elements at `indices`, which ascend.
    pub(crate) fn with_at(self, indices: &[usize], values: &Flat) -> Result<Flat> {
        match (self.apart(), values) {
            (Flat::Host(mut whole), values @ (Flat::Host(_) | Flat::Part(..))) if indices.len() == values.len() => {
                indices.iter().zip(values.host()?).for_each(|(index, value)| whole[*index] = *value);
                Ok(Flat::Host(whole))
            }
            (whole @ Flat::Device(_), Flat::Device(_)) => {
                let (Some(whole), Some(values)) = (whole.into_tensor()?, values.clone().into_tensor()?) else {
                    return Err(misplaced());
                };
                let at = || positions(indices, &whole.device());
                // Nothing replaces on every device, and adding to zero is exact.
                let without = whole.clone().select(0, at()).neg();
                let zeroed = whole.clone().select_assign(0, at(), without, IndexingUpdateOp::Add);
                Ok(Flat::Device(vec![zeroed.select_assign(0, at(), values, IndexingUpdateOp::Add)]))
            }
            _ => Err(misplaced()),
        }
    }

    /// `self + share·(other − self)`, element by element: `self` with a share of 0, `other` with 1. In PyTorch's order (`lerp`), so that both
    /// are exact.
    pub(crate) fn mixed(self, other: Flat, share: f32) -> Result<Flat> {
        if share == 0.0 {
            return Ok(self);
        }
        let (near, far) = if share < 0.5 { (self, other) } else { (other, self) };
        let share = if share < 0.5 { share } else { 1.0 - share };
        let difference = far.plus_scaled(-1.0, &near)?;
        near.plus_scaled(share, &difference)
    }
}

/// Indices as a device takes them.
fn positions(indices: &[usize], device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i32> = indices.iter().map(|index| *index as i32).collect();
    let count = indices.len();
    Tensor::from_data(TensorData::new(indices, [count]), device)
}

#[cfg(test)]
mod tests {
    use super::super::tests::device;
    use super::*;

    #[test]
    fn what_is_computed_on_a_device_is_what_the_host_computes() {
        let (a, b) = (vec![1.0f32, -2.5, 3.0], vec![0.5f32, 4.0, -1.0]);
        let host = |values: &[f32]| Flat::Host(values.to_vec());
        let both = |on_host: Flat, on_device: Flat| {
            assert!(matches!(on_device, Flat::Device(_)));
            let values = on_host.into_host().unwrap();
            assert_eq!(on_device.into_host().unwrap(), values);
            values
        };
        let sum = both(
            host(&a).plus_scaled(-2.0, &host(&b)).unwrap(),
            device(&[&a[..1], &a[1..]]).plus_scaled(-2.0, &device(&[&b])).unwrap(),
        );
        assert_eq!(sum, [0.0, -10.5, 5.0]);
        for (share, expected) in
            [(0.0, a.clone()), (0.25, vec![0.875, -0.875, 2.0]), (0.5, vec![0.75, 0.75, 1.0]), (1.0, b.clone())]
        {
            let mixed = both(
                host(&a).mixed(host(&b), share).unwrap(),
                device(&[&a]).mixed(device(&[&b[..2], &b[2..]]), share).unwrap(),
            );
            assert_eq!(mixed, expected, "{share}");
        }
        assert!(host(&a).plus_scaled(1.0, &device(&[&b])).is_err());
        assert!(host(&a).plus_scaled(1.0, &host(&b[1..])).is_err());
    }
}
