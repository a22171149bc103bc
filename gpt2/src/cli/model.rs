//! A trained model, as commands open it.

use std::path::Path;

use super::CliError;
use super::train::{Pass, check_tensors};
use crate::checkpoint::StoredWeights;
use crate::devices::{CheckedDevice, DeviceChoice};
use crate::segments::SegmentedModel;
use crate::tokenizer::{Tokenizer, TokenizerKind};

/// A model in the memory of its device.
pub(super) struct OpenModel {
    pub(super) model: SegmentedModel,
    pub(super) tokenizer: Tokenizer,
    /// Whether it was trained on several documents.
    pub(super) several_documents: bool,
}

impl OpenModel {
    /// The model at `path`, on a device that has room for what it is to do. `asked` names the tokenizer of one that does not say it.
    pub(super) fn open(
        path: &Path,
        asked: Option<TokenizerKind>,
        device: DeviceChoice,
        pass: Pass,
    ) -> Result<Self, CliError> {
        let stored = StoredWeights::open(path)?;
        let tokenizer = tokenizer_of(&stored, asked)?;
        let several_documents = stored.several_documents();
        let CheckedDevice { device: opened, largest_tensor } = device.open()?;
        if let Some(limit) = largest_tensor {
            check_tensors(device, limit, stored.config(), pass)?;
        }
        let mut model = SegmentedModel::absent(stored.config().clone(), crate::segments::Compute::default(), &opened)?;
        for segment in 0..model.segments().len() {
            model.write_params(segment, &stored.segment(segment)?)?;
        }
        Ok(OpenModel { model, tokenizer, several_documents })
    }
}

/// The tokenizer of a checkpoint; `asked` names that of one that does not say it.
pub(super) fn tokenizer_of(stored: &StoredWeights, asked: Option<TokenizerKind>) -> Result<Tokenizer, CliError> {
    let path = stored.path().display();
    let tokenizer = match (stored.tokenizer()?, asked) {
        (Some(own), Some(asked)) if own.kind() != asked => {
            return Err(format!("--tokenizer {asked}: the model in {path} has the tokenizer {}", own.kind()).into());
        }
        (Some(own), _) => own,
        (None, Some(TokenizerKind::Gpt2)) => Tokenizer::gpt2(),
        (None, Some(TokenizerKind::Bytes)) => Tokenizer::bytes(),
        (None, Some(TokenizerKind::Chars)) => {
            return Err(format!("--tokenizer chars: the files in {path} do not list the model's characters").into());
        }
        (None, None) => {
            return Err(
                format!("the files in {path} do not name the model's tokenizer; name it with --tokenizer").into()
            );
        }
    };
    check_vocabulary(stored, &tokenizer)?;
    Ok(tokenizer)
}

/// Refuses a tokenizer that is not a checkpoint's: where the checkpoint says which it has, its model may have more ids than that, for speed.
pub(super) fn check_vocabulary(stored: &StoredWeights, tokenizer: &Tokenizer) -> Result<(), CliError> {
    let (known, has) = (tokenizer.vocab_size(), stored.config().vocab_size);
    let fits = if stored.tokenizer()?.is_some() { known <= has } else { known == has };
    if fits {
        return Ok(());
    }
    Err(format!(
        "checkpoint {}: the tokenizer {} has {known} tokens, and the model has {has}, so they do not belong together",
        stored.path().display(),
        tokenizer.kind()
    )
    .into())
}
