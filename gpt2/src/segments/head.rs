//! The head, its loss and its backward pass.

use burn::tensor::Tensor;

use super::cross_entropy::{self, Loss};
use super::pass::part_sums;
use super::{Destination, ModelError, SegmentedModel};
use crate::fused::{self, PartSums};
use crate::model::Kernels;

/// What comes of the head in a training pass.
pub(super) struct HeadGrads {
    pub(super) loss: Loss,
    /// Gradient of the final norm's output.
    pub(super) dhidden_nc: Tensor<2>,
    /// The head's part of the token table's gradient.
    pub(super) table: TableGradient,
}

/// The token table's gradient, of which the head's part comes first.
pub(super) enum TableGradient {
    /// In f32, with the rest of its segment's.
    Sums(PartSums),
    /// In f32 or in the type of computation; rows behind the vocabulary are no token's.
    Tensor(Box<Tensor<2>>),
}

impl SegmentedModel {
    /// The mean loss, and the gradients of `scale` times it, of which that of the table goes to the `destination` of its segment's where a
    /// pass writes them to one vector. The caller has checked that `targets` lie in the vocabulary and match the rows.
    pub(super) fn head_gradients(
        &self,
        hidden_nc: Tensor<2>,
        targets: &[i32],
        scale: f32,
        destination: impl FnOnce() -> Destination,
    ) -> HeadGrads {
        if let Kernels::Fused(_) = self.kernels() {
            let wte_vc = self.embedding.wte.weight.val();
            let mut sums = part_sums(destination(), self.infos[0].params.iter().map(|param| param.len));
            let fused::HeadGrads { loss, dhidden_nc } =
                fused::head_gradients(hidden_nc, wte_vc, targets, scale, &mut sums);
            return HeadGrads { loss: Loss::Known(loss), dhidden_nc, table: TableGradient::Sums(sums) };
        }
        let (v, table_vc) = (self.config.vocab_size, self.table_vc());
        let logits_nv = hidden_nc.clone().matmul(table_vc.clone().transpose());
        let (loss, dlogits_nv) = cross_entropy::loss_and_gradient(logits_nv, v, targets, scale);
        let dlogits_nv = dlogits_nv.cast(self.compute.precision.float());
        let dhidden_nc = dlogits_nv.clone().matmul(table_vc);
        let dwte_vc = dlogits_nv.transpose().matmul(hidden_nc);
        HeadGrads { loss, dhidden_nc, table: TableGradient::Tensor(Box::new(dwte_vc)) }
    }

    /// The mean loss alone, as [`head_gradients`](Self::head_gradients) has it.
    pub(super) fn head_loss(&self, hidden_nc: Tensor<2>, targets: &[i32]) -> Result<f64, ModelError> {
        if let Kernels::Fused(_) = self.kernels() {
            return Ok(fused::head_loss(hidden_nc, self.embedding.wte.weight.val(), targets));
        }
        let logits_nv = hidden_nc.matmul(self.table_vc().transpose());
        cross_entropy::mean_loss(logits_nv, self.config.vocab_size, targets)
    }

    /// The token table for products whose results are not read: with the rows behind it where the device has them.
    fn table_vc(&self) -> Tensor<2> {
        self.long_table_vc.clone().unwrap_or_else(|| self.embedding.wte.weight.val())
    }

    /// Logits `[n, v]`, in the type of computation.
    pub(super) fn logits_nv(&self, hidden_nc: Tensor<2>) -> Tensor<2> {
        hidden_nc.matmul(self.embedding.wte.weight.val().transpose())
    }
}
