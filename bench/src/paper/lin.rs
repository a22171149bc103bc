//! `bench paper lin`: J. Lin, X. Li, G. Pekhimenko, "Multi-node Bert-pretraining: Cost-efficient Approach", 2020 (arXiv 2008.00177).
//!
//! Of the paper its abstract could be read; of its body nothing, so that what [`STATED`] has beyond the abstract rests on accounts of others. The paper trains BERT. What
//! of it concerns BERT alone is named in [`ONLY_BERT`]; the rest is done here with GPT-2.

mod cells;
mod found;
mod show;

use gpt2::cli::say;
use gpt2::config::Preset;
use gpt2::optim::OptimizerKind;
use gpt2::tokenizer::TokenizerKind;
use rig::BenchError;
use rig::link::{Profile, gain_namespaces};
use rig::record::LOOPBACK;

use super::options::{LinArgs, Settings, Size};
use super::row::Row;
use super::rows::{records, say_files};
use super::text::paragraph;
use crate::links::keep_possible;
use crate::plan::Draft;
use cells::Choices;
use found::Found;

/// BERT-large's shape, its two lengths of sequences, and the ranks of a node. The batch is this program's, for want of the paper's.
const FULL: Size = Size {
    preset: Preset::Gpt2Medium,
    block_size: Some(512),
    ranks: 8,
    batch: 128,
    tokenizer: TokenizerKind::Gpt2,
    row_timeout: 7 * 24 * 3600,
};

/// What a laptop trains in a few minutes, with sequences enough for 4 ranks and 4 micro-steps.
const SMALL: Size = Size { batch: 32, ..Size::SMALL };

/// Runs the rows and says what there is to say.
pub(super) fn run(args: &LinArgs) -> Result<Vec<Row>, BenchError> {
    let links = links(&args.links)?;
    let full = args.common.is_full();
    let steps = args.steps.unwrap_or(if full { 100 } else { 30 });
    if steps == 0 {
        return Err("--steps must be at least 1".into());
    }
    let settings = args.common.check(if full { &FULL } else { &SMALL })?;
    let choices = Choices {
        links,
        steps,
        mixed: args.mixed,
        optimizer: args.optimizer,
        schedule: schedule(args.optimizer, steps, full),
        accumulation: args.accumulation,
        ranks: settings.ranks,
        scale_ranks: args.scale_ranks.clone(),
        batch: settings.batch,
        block: settings.model.block_size,
    };
    choices.check()?;
    let mut draft = Draft::ready("lin")?;
    settings.put(&mut draft);
    choices.put(&mut draft);
    let wanted = choices.wanted(&draft)?;
    settings.batches(&draft)?;
    let what = format!("{steps} steps, optimizer {}, links: {}", choices.optimizer, choices.links.join(", "));
    settings.introduce("Lin et al. 2020 (arXiv 2008.00177): its optimizations one after another, on GPT-2", &what);
    say(format_args!("{}\n", paragraph(STATED)));
    if full {
        say(format_args!("{}\n", paragraph(STATED_FULL)));
    }
    let (records, mut file) = records(&settings, &draft)?;
    let found = Found::of(wanted, &records, settings.corpus.vocab_size(), choices.links.clone())?;
    found.rows().try_for_each(|row| file.write(row))?;
    show::tables(&found);
    say(format_args!("\n{}", paragraph(ONLY_BERT)));
    say(format_args!("\n{}", paragraph(&caveats(&settings))));
    let pictures = show::pictures(&found, &settings.out)?;
    say_files(&settings, &["rows.jsonl", "results.jsonl (records, with every step and rank)"], &pictures);
    show::findings(&found);
    Ok(found.into_rows())
}

/// The links that there can be here.
fn links(wanted: &[String]) -> Result<Vec<String>, BenchError> {
    for name in wanted {
        Profile::find(name).map_err(|why| format!("--links: {why}"))?;
    }
    if wanted.is_empty() {
        return Err("--links: give at least one, such as lan-1g".into());
    }
    if wanted.iter().all(|link| link == LOOPBACK) {
        return Ok(wanted.to_vec());
    }
    // Before there is a second thread.
    gain_namespaces();
    let mut links = wanted.to_vec();
    keep_possible(&mut links);
    if links.is_empty() {
        links.push(LOOPBACK.into());
    }
    Ok(links)
}

/// LAMB's own rule for its learning rate, 6.25e-4 at 512 sequences and as the root of their number (You et al. 2020, arXiv 1904.00962), gives 3e-4
/// for 128; small models take larger ones.
fn schedule(optimizer: OptimizerKind, steps: u64, full: bool) -> String {
    let rates = match (optimizer, full) {
        (OptimizerKind::Lamb, false) => "0.01 0.001",
        (_, false) => "0.001 0.0001",
        (_, true) => "0.0003 0.00003",
    };
    format!("cosine {rates} {} {}", (steps / 12).min(2000), steps.max(10))
}

const STATED: &str = "What the paper states (abstract): BERT can be pretrained in 12 days on a cluster of widely available GPUs of a \
    university's size, by optimizing the throughput of a single device, the distribution over nodes and GPUs, and the communication, for \
    which the network is the bottleneck; with much less expensive hardware than NVIDIA's DGX machines or Google's TPU Pods. According to \
    descriptions of the paper by others, which could not be checked: data sharding, mixed precision, fused kernels, gradient accumulation, \
    communication during the backward pass; LAMB, in two phases with sequences of 128 and of 512 tokens; nodes of T4 GPUs and a network of \
    10 Gbit/s. Not found: its tables and figures, batch, learning rate, micro-steps, and what each optimization gained.";

const STATED_FULL: &str = "--full takes from that GPT-2 with 350 million parameters, which has the 24 layers, 16 heads and width 1024 of BERT-large, \
    sequences of 512 tokens and of 128, LAMB, and the 8 ranks of a node. 128 sequences a step and the learning rate of LAMB's rule for them are \
    this program's, and so is GPT-2's tokenizer; give a text with --data.";

const ONLY_BERT: &str = "What BERT has and this run does not: the masked-word and next-sentence losses (GPT-2 learns from every token, so \
    a step of as many tokens learns more), attention in both directions, segments of sentence pairs, WordPiece, prepared shards of masked \
    text, and the score on SQuAD after fine-tuning by which BERT is judged. The phases are as BERT's: nine tenths of the steps with \
    sequences a fourth as long, after which the other positions, which GPT-2 learns as BERT does, are trained. A step of either phase has \
    the same tokens here, and a batch of the same text, so that the phases differ in nothing else.";

fn caveats(settings: &Settings) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut said = format!(
        "What this run cannot show. It has one run of each row, over {} on one machine with {cores} cores. So a difference is stated only \
         if the quartiles of the step times do not overlap. A CPU converts 16-bit types to f32 to compute: mixed precision halves the \
         bytes sent and the memory of activations, but its arithmetic is not faster, whereas a T4 multiplies f16 several times faster than \
         f32. Every rank always reads only its own part of a batch; to see how much reading this saves, compare the column `data` of one \
         device and of the ranks.",
        settings.transport
    );
    if !settings.full {
        said.push_str(&format!(
            " The model has {:.1} M parameters, not BERT-large's 340 M, and the text is read byte by byte (--full has the paper's size).",
            settings.model.parameter_count() as f64 / 1e6
        ));
    }
    said
}

#[cfg(test)]
mod tests {
    use rig::training::schedule as read;

    use super::*;

    #[test]
    fn schedules_can_be_read_and_the_small_one_is_the_ready_plans() {
        for optimizer in OptimizerKind::ALL {
            for full in [false, true] {
                assert!(read(&schedule(optimizer, 30, full)).is_ok());
            }
        }
        assert_eq!(schedule(OptimizerKind::Lamb, 30, false), cells::tests::choices().schedule);
    }

    #[test]
    fn links_are_those_that_there_are() {
        assert_eq!(links(&[LOOPBACK.into()]).unwrap(), [LOOPBACK]);
        assert!(links(&["moon".into()]).unwrap_err().to_string().contains("--links"));
        assert!(links(&[]).unwrap_err().to_string().contains("at least one"));
    }
}
