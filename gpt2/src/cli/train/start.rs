//! What a run begins with: a size and random weights, weights, or a checkpoint.

use super::super::CliError;
use super::super::model::check_vocabulary;
use super::TrainArgs;
use crate::checkpoint::sharded::{Saved, SavedError};
use crate::checkpoint::{InitialWeights, StoredWeights};
use crate::config::{ModelConfig, Preset};
use crate::corpus::Corpus;
use crate::tokenizer::Tokenizer;

/// What a run's model and tokenizer come from.
pub(super) enum Start {
    /// A size, and random weights.
    Preset(Preset),
    /// Weights.
    Stored(Box<StoredWeights>),
    /// A checkpoint of the whole state of a run that began with weights.
    Saved(Box<Begun>),
}

/// What a run that goes on has from the weights that it began with.
pub(super) struct Begun {
    initial: InitialWeights,
    model: ModelConfig,
    tokenizer: Tokenizer,
}

impl Begun {
    /// Of the run in `saved`, if it began with weights.
    fn of(saved: &Saved) -> Result<Option<Self>, SavedError> {
        let state = saved.state();
        let unreadable = |error: serde_json::Error| SavedError::Foreign {
            path: saved.folder().into(),
            detail: format!("the model that it started from: {error}"),
        };
        let initial = serde_json::from_value::<Option<InitialWeights>>(state.config["initial"].clone());
        let Some(initial) = initial.map_err(unreadable)? else { return Ok(None) };
        let model = serde_json::from_value(state.config["model"].clone()).map_err(unreadable)?;
        let tokenizer = serde_json::from_value(state.tokenizer.clone()).map_err(unreadable)?;
        Ok(Some(Begun { initial, model, tokenizer }))
    }
}

impl Start {
    /// Of a run that goes on from `saved`, if from any.
    pub(super) fn new(args: &TrainArgs, saved: Option<&Saved>) -> Result<Self, CliError> {
        if let Some(begun) = saved.map(Begun::of).transpose()?.flatten() {
            return Ok(Start::Saved(Box::new(begun)));
        }
        let Some(path) = &args.init_from else { return Ok(Start::Preset(args.preset.unwrap_or(Preset::Tiny))) };
        let stored = StoredWeights::open(path)?;
        if let Some(preset) = args.preset {
            let wanted =
                ModelConfig { block_size: stored.config().block_size, ..preset.config(stored.config().vocab_size) };
            if wanted != *stored.config() {
                return Err(format!(
                    "--preset {preset} has another size than the model of --init-from {}; leave out --preset",
                    path.display()
                )
                .into());
            }
        }
        Ok(Start::Stored(Box::new(match args.block_size {
            Some(size) => stored.with_block_size(size)?,
            None => stored,
        })))
    }

    /// The tokenizer that the weights belong to, where it is known.
    pub(super) fn tokenizer(&self) -> Result<Option<Tokenizer>, CliError> {
        match self {
            Start::Preset(_) => Ok(None),
            Start::Stored(stored) => Ok(stored.tokenizer()?),
            Start::Saved(begun) => Ok(Some(begun.tokenizer.clone())),
        }
    }

    /// The model's shape for the text's tokens, and its weights where there are any.
    pub(super) fn model(
        &self,
        args: &TrainArgs,
        corpus: &Corpus,
    ) -> Result<(ModelConfig, Option<InitialWeights>), CliError> {
        match self {
            Start::Preset(preset) => {
                let mut model = preset.config(corpus.vocab_size());
                model.block_size = args.block_size.unwrap_or(model.block_size);
                model.validate()?;
                Ok((model, None))
            }
            Start::Stored(stored) => {
                check_vocabulary(stored, corpus.tokenizer())?;
                // Its ranks open it for themselves.
                let path = args.init_from.clone().unwrap_or_default();
                Ok((stored.config().clone(), Some(InitialWeights { path, hash: stored.hash()? })))
            }
            Start::Saved(begun) => {
                let Begun { initial, model, .. } = &**begun;
                // What is given besides and contradicts the checkpoint is found where the settings are compared.
                let block_size = args.block_size.unwrap_or(model.block_size);
                let given = args.preset.map_or_else(|| model.clone(), |preset| preset.config(model.vocab_size));
                Ok((ModelConfig { block_size, ..given }, Some(initial.clone())))
            }
        }
    }

    pub(super) fn describe(&self) -> String {
        match self {
            Start::Preset(preset) => preset.to_string(),
            Start::Stored(stored) if stored.step() > 0 => {
                format!("from {} after {} steps", stored.path().display(), stored.step())
            }
            Start::Stored(stored) => format!("from {}", stored.path().display()),
            Start::Saved(begun) => format!("started from {}", begun.initial.path.display()),
        }
    }
}
