//! A block that goes on from the tokens before: their keys and values are kept, so that a token costs one token's work.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, FloatDType, Tensor};

use super::{About, Attention, Block, Kernels, Layer, causal_mask};

/// Keys and values of one block, of the tokens so far of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct KeysAndValues {
    /// `[1, h, block_size, q]`, of which the first `len` positions are known.
    keys_bhtq: Tensor<4>,
    values_bhtq: Tensor<4>,
    len: usize,
}

impl KeysAndValues {
    /// Of no tokens yet, with room for `block_size`.
    pub(crate) fn none(n_head: usize, block_size: usize, head_dim: usize, device: &Device) -> Self {
        let zeros = || Tensor::zeros([1, n_head, block_size, head_dim], device);
        KeysAndValues { keys_bhtq: zeros(), values_bhtq: zeros(), len: 0 }
    }

    /// Appends those of the next tokens, in the memory that is there, and gives all of both.
    fn append(self, keys_bhtq: Tensor<4>, values_bhtq: Tensor<4>) -> (Self, Tensor<4>, Tensor<4>) {
        let [b, h, t, q] = keys_bhtq.dims();
        let len = self.len + t;
        let place = [0..b, 0..h, self.len..len, 0..q];
        let keys = self.keys_bhtq.slice_assign(place.clone(), keys_bhtq.cast(FloatDType::F32));
        let values = self.values_bhtq.slice_assign(place, values_bhtq.cast(FloatDType::F32));
        let all = [&keys, &values].map(|all| all.clone().narrow(2, 0, len));
        let [all_keys, all_values] = all;
        (KeysAndValues { keys_bhtq: keys, values_bhtq: values, len }, all_keys, all_values)
    }
}

impl Block {
    /// The residual stream `[1, t, c]` of the next tokens through this block, and the keys and values of all tokens so far. Without gradients.
    pub(crate) fn forward_cached(
        &self,
        x_btc: Tensor<3>,
        cache: KeysAndValues,
        kernels: Kernels<'_>,
    ) -> (Tensor<3>, KeysAndValues) {
        let (mixed, cache) = self.attn.forward_cached(self.ln_1.forward(x_btc.clone(), kernels), cache, kernels);
        let x_btc = x_btc + mixed;
        // This layer looks at no mask.
        let about = About::mask(causal_mask(1, &x_btc.device()));
        (x_btc.clone() + self.mlp.forward(self.ln_2.forward(x_btc, kernels), &about, kernels), cache)
    }
}

impl Attention {
    fn forward_cached(
        &self,
        x_btc: Tensor<3>,
        cache: KeysAndValues,
        kernels: Kernels<'_>,
    ) -> (Tensor<3>, KeysAndValues) {
        let ([b, t, c], dtype) = (x_btc.dims(), FloatDType::from(x_btc.dtype()));
        let (q, before) = (c / self.n_head, cache.len);
        let qkv_btc3 = self.c_attn.forward(x_btc, kernels);
        let [query_bhtq, key_bhtq, value_bhtq]: [Tensor<4>; 3] = [0, 1, 2]
            .map(|part| qkv_btc3.clone().narrow(2, part * c, c).reshape([b, t, self.n_head, q]).swap_dims(1, 2));
        let (cache, keys_bhtq, values_bhtq) = cache.append(key_bhtq, value_bhtq);
        let query_bhtq = query_bhtq.cast(FloatDType::F32);
        let mut scores_bhtt = query_bhtq.matmul(keys_bhtq.transpose()) / (q as f64).sqrt();
        if t > 1 {
            // The first of these tokens sees the ones before and itself.
            let len = before + t;
            scores_bhtt = scores_bhtt.clone() + causal_mask(len, &scores_bhtt.device()).narrow(2, before, t);
        }
        let mixed_bhtq = softmax(scores_bhtt, 3).matmul(values_bhtq).cast(dtype);
        (self.c_proj.forward(mixed_bhtq.swap_dims(1, 2).reshape([b, t, c]), kernels), cache)
    }
}
