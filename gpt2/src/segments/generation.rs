//! A sequence that grows token by token.

use burn::tensor::{FloatDType, Tensor};

use super::{ModelError, SegmentedModel, read_back};
use crate::model::KeysAndValues;

/// One sequence on a model, with the keys and values of its tokens: each further token costs one token's work, and the work for the logits is
/// that of the last position alone.
#[derive(Clone, Debug)]
pub struct Generation<'a> {
    model: &'a SegmentedModel,
    blocks: Vec<KeysAndValues>,
    len: usize,
}

impl<'a> Generation<'a> {
    /// A sequence of no tokens.
    pub fn new(model: &'a SegmentedModel) -> Self {
        Generation { model, blocks: Vec::new(), len: 0 }
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it has as many tokens as the model has positions, so that none can follow.
    pub fn is_full(&self) -> bool {
        self.len >= self.model.config.block_size
    }

    /// Appends `tokens`, and gives the logits `[vocab_size]` of what follows the last of them. After an error of the device the
    /// sequence is empty.
    ///
    /// # Errors
    /// [`ModelError::SequenceLength`] for no tokens, or more than the model has positions left for; [`ModelError::TokenOutOfRange`],
    /// [`ModelError::Absent`], [`ModelError::Device`].
    pub fn push(&mut self, tokens: &[i32]) -> Result<Vec<f32>, ModelError> {
        let model = self.model;
        let (start, count, block_size) = (self.len, tokens.len(), model.config.block_size);
        if start + count > block_size {
            return Err(ModelError::SequenceLength { rows: 1, cols: start + count, block_size });
        }
        let tokens_bt = model.check_tokens("inputs", tokens, 1, count)?;
        (0..model.infos.len()).try_for_each(|segment| model.require(segment))?;
        let kernels = model.kernels();
        let (heads, width) = (model.config.n_head, model.config.head_dim());
        let mut caches = std::mem::take(&mut self.blocks);
        self.len = 0;
        if caches.is_empty() {
            let none = || KeysAndValues::none(heads, block_size, width, &model.device);
            caches = model.blocks.iter().map(|_| none()).collect();
        }
        let mut x_btc = model.embed(start, tokens_bt, tokens);
        for (block, cache) in model.blocks.iter().zip(caches) {
            let (next, cache) = block.forward_cached(x_btc, cache, kernels);
            x_btc = next;
            self.blocks.push(cache);
        }
        let last_btc = x_btc.narrow(1, count - 1, 1);
        let hidden_nc: Tensor<2> = model.norm.ln_f.forward(last_btc, kernels).reshape([1, model.config.n_embd]);
        let logits_nv = hidden_nc.matmul(model.embedding.wte.weight.val().transpose()).cast(FloatDType::F32);
        let logits = read_back(model.config.n_layer + 1, "reading logits", logits_nv)?;
        self.len = start + count;
        Ok(logits)
    }
}
