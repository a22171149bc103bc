//! `bench paper patwardhan`: I. Patwardhan, S. Gandhi, O. Khare, A. Joshi, S. Sawant, "A Comparative Analysis of Distributed Training
//! Strategies for GPT-2", 2024 (arXiv 2405.15628).
//!
//! Of the paper its abstract and the titles of its figures could be read, and summaries that others published of it; of its body nothing.

use gpt2::cli::say;
use gpt2::config::Preset;
use gpt2::memory::Category;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use rig::BenchError;
use rig::lines::Lines;
use rig::plot::{self, Bars, Labels, Line};
use rig::record::Axis;
use serde::Serialize;

use super::options::{PatwardhanArgs, Settings, Size};
use super::row::{Row, Run, Variant, by_purpose};
use super::rows::{measure, measured, picture, say_files};
use super::text::{number, paragraph, table, times, verdict};
use crate::plan::Draft;

/// Two devices; sequence length and batch are this program's, for want of the paper's.
const FULL: Size = Size {
    preset: Preset::Gpt2,
    block_size: None,
    ranks: 2,
    batch: 8,
    tokenizer: TokenizerKind::Gpt2,
    row_timeout: 7 * 24 * 3600,
};

/// Most steps of an epoch in the small size.
const SMALL_EPOCH: u64 = 100;

/// One epoch of one row: a line of `epochs.jsonl`.
#[derive(Clone, Debug, Serialize)]
struct Epoch {
    row: String,
    epoch: u64,
    steps: usize,
    /// From the end of the epoch's first step to the end of its last, and as much for the first as for the others: validation, which
    /// comes before the first, is left out. None of an epoch of one step.
    seconds: Option<f64>,
    /// Of all ranks, over that time.
    tokens_per_s: Option<f64>,
    /// Mean over the epoch's steps.
    training_loss: f64,
    /// After the epoch.
    validation_loss: Option<f64>,
    /// Mean over the epoch's steps of the global gradient norm, before clipping.
    gradient_norm: f64,
    largest_gradient_norm: f64,
}

/// Runs the rows and says what there is to say.
pub(super) fn run(args: &PatwardhanArgs) -> Result<Vec<Row>, BenchError> {
    let full = args.common.is_full();
    if args.epochs == 0 || args.steps == Some(0) {
        return Err("--epochs and --steps must be at least 1".into());
    }
    let mut settings = args.common.check(if full { &FULL } else { &Size::SMALL })?;
    if let Some(most) = args.steps.or((!full).then_some(SMALL_EPOCH)) {
        settings.cut_text(most)?;
    }
    let mut draft = Draft::ready("patwardhan")?;
    settings.put(&mut draft);
    let an_epoch = settings.batches(&draft)?.steps_per_epoch() as u64;
    let steps = an_epoch.checked_mul(args.epochs).ok_or("--epochs is too large")?;
    let rates = if full { "0.0006 0.00006" } else { "0.001 0.0001" };
    draft
        .set(Axis::Steps, &[steps])
        .set(Axis::ValidateEvery, &[an_epoch])
        .set(Axis::Schedule, &[format!("cosine {rates} {} {}", (steps / 20).min(100), steps.max(10))]);
    settings.introduce(
        "Patwardhan et al. 2024 (arXiv 2405.15628), repeated under equal conditions",
        &format!("{} epochs of {an_epoch} steps", args.epochs),
    );
    say(format_args!("{}\n", paragraph(STATED)));
    if full {
        say(format_args!("{}\n", paragraph(STATED_FULL)));
    }
    let mut file = Lines::create(&settings.out.join("epochs.jsonl"))?;
    let rows = measure(&settings, &draft, &variants())?;
    let epochs: Vec<Epoch> = measured(&rows).flat_map(|(row, summary)| epochs(row, summary)).collect();
    for epoch in &epochs {
        file.write(epoch)?;
    }
    say_tables(&rows, &epochs);
    say(format_args!("\n{}", paragraph(UNKNOWN)));
    say(format_args!("\n{}", paragraph(&findings(&rows, &epochs))));
    say(format_args!("\n{}", paragraph(&caveats(&settings))));
    let pictures = draw(&rows, &epochs, &settings)?;
    say_files(
        &settings,
        &["rows.jsonl", "results.jsonl (records, with every step and rank)", "epochs.jsonl"],
        &pictures,
    );
    Ok(rows)
}

fn variants() -> Vec<Variant> {
    vec![
        Variant::new(StrategyKind::Single, "Single GPU"),
        Variant::new(StrategyKind::Ddp, "DDP"),
        Variant::new(StrategyKind::Fsdp, "FSDP"),
    ]
}

const STATED: &str = "What the paper states: GPT-2, PyTorch's DDP and FSDP (abstract); throughput, gradient norm, training time, memory and \
    loss by epoch (titles of its figures). By summaries that others published: 12 layers and 12 heads, a vocabulary of 50 257, two T4 GPUs, \
    the dataset All the News. Not found: sequence length, batch and whether it is the same in all rows, learning rate, number of epochs, and \
    the figures themselves.";

const STATED_FULL: &str = "--full takes from that the model, the tokenizer and two devices. Sequences of 1024 tokens (GPT-2's own), 8 a step, \
    a learning rate of 6e-4 and the number of epochs are this program's; give All the News with --data.";

const UNKNOWN: &str = "What is equal here: all rows use one training loop, with the same seed, order of the data, global batch and \
    schedule, with clipping after averaging and one update in each step. This was checked for each row, and so were operations and bytes \
    by the formula. So a step, an epoch and a loss mean the same in each row. Whether that was so in the original could not be verified. \
    If the batch is a number for each device, as with PyTorch's samplers, an epoch has half as many steps on two devices, and losses by \
    epoch compare numbers of updates rather than strategies.";

fn epochs(row: &Row, summary: &Run) -> Vec<Epoch> {
    let known = [summary.epochs.len(), summary.losses.len(), summary.grad_norms.len(), summary.seconds.len()];
    let known = known.into_iter().min().unwrap_or(0);
    let tokens = (row.config.global_batch * row.config.model.block_size) as f64;
    let mut result: Vec<Epoch> = Vec::new();
    let mut first = 0;
    while first < known {
        let number = summary.epochs[first];
        let steps = summary.epochs[first..known].iter().take_while(|epoch| **epoch == number).count();
        let last = first + steps - 1;
        let between = summary.seconds[last] - summary.seconds[first];
        let seconds = (steps > 1).then(|| between * steps as f64 / (steps - 1) as f64);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let norms = &summary.grad_norms[first..=last];
        let after = summary.validations.iter().find(|(step, _)| *step == last as u64 + 1);
        result.push(Epoch {
            row: row.name.clone(),
            epoch: number,
            steps,
            seconds,
            tokens_per_s: seconds.map(|seconds| tokens * steps as f64 / seconds),
            training_loss: mean(&summary.losses[first..=last]),
            validation_loss: after.map(|(_, loss)| *loss),
            gradient_norm: mean(norms),
            largest_gradient_norm: norms.iter().copied().fold(0.0, f64::max),
        });
        first = last + 1;
    }
    result
}

fn say_tables(rows: &[Row], epochs: &[Epoch]) {
    let lines: Vec<Vec<String>> = epochs
        .iter()
        .map(|epoch| {
            vec![
                epoch.row.clone(),
                epoch.epoch.to_string(),
                epoch.steps.to_string(),
                number(epoch.tokens_per_s, 0),
                number(epoch.seconds, 2),
                number(Some(epoch.gradient_norm), 4),
                number(Some(epoch.largest_gradient_norm), 4),
                number(Some(epoch.training_loss), 4),
                number(epoch.validation_loss, 4),
            ]
        })
        .collect();
    let header = ["row", "epoch", "steps", "tokens/s", "seconds", "mean norm", "largest norm", "loss", "val. loss"];
    say(format_args!("\nepoch by epoch (the time does not include validation)\n{}", table(&header, &lines, 1)));

    let single = rows.first().and_then(|row| row.summary.as_ref());
    let mut header = vec!["row", "tokens/s", "of single", "tokens/s a rank", "step ms", "exposed ms", "CPU %", "MB"];
    header.extend(Category::ALL.map(Category::name));
    header.extend(["RSS", "ops/step", "MB sent/step", "optimizer steps", "status"]);
    let lines: Vec<Vec<String>> = measured(rows)
        .map(|(row, summary)| {
            let ranks = &summary.ranks;
            let exposed = ranks.iter().map(|rank| rank.parts.exposed + rank.parts.scalars).fold(0.0, f64::max);
            let most = |of: fn(&super::row::RankRun) -> u64| ranks.iter().map(of).max().unwrap_or(0);
            let mut line = vec![
                row.name.clone(),
                format!("{:.0}", summary.tokens_per_s),
                number(single.map(|single| summary.tokens_per_s / single.tokens_per_s), 2),
                format!("{:.0}", summary.tokens_per_s / row.ranks as f64),
                number(Some(summary.step_ms), 1),
                number(Some(exposed), 1),
                super::text::by_rank(ranks.iter().map(|rank| format!("{:.0}", 100.0 * rank.cpu_utilization))),
            ];
            let usage = row.fullest().map(|(_, usage)| usage);
            line.push(number(usage.map(|usage| usage.total.peak as f64 / 1e6), 1));
            let parts = usage.map(|usage| by_purpose(&usage));
            line.extend((0..Category::ALL.len()).map(|part| number(parts.map(|parts| parts[part] / 1e6), 1)));
            line.push(number(Some(most(|rank| rank.peak_rss_bytes) as f64 / 1e6), 0));
            line.push(format!("{} of {}", most(|rank| rank.operations), most(|rank| rank.operations_expected)));
            line.push(format!("{:.2}", most(|rank| rank.bytes_expected) as f64 / 1e6));
            line.push(format!("{} of {}", most(|rank| rank.optimizer_steps.1), summary.steps));
            line.push(row.status.clone());
            line
        })
        .collect();
    say(format_args!("\nthe whole run\n{}", table(&header, &lines, 1)));
    say(
        "MB: peak memory during training, of the rank that takes most; the columns after it have each purpose at its own peak; ops/step: \
         operations counted, and by the formula; exposed: how long a step waits for other ranks",
    );
}

fn findings(rows: &[Row], epochs: &[Epoch]) -> String {
    let of = |kind: StrategyKind| measured(rows).find(|(row, _)| row.config.strategy == kind);
    let (single, ddp, fsdp) = (of(StrategyKind::Single), of(StrategyKind::Ddp), of(StrategyKind::Fsdp));
    let mut said = vec!["What this run finds. According to a published summary, the paper finds that FSDP is best in memory, that a single \
        GPU has a high throughput but takes longer, that DDP is in the middle, and that all losses converge."
        .to_string()];
    let peak = |row: &Row| row.fullest().map(|(_, usage)| usage);
    if let (Some((fsdp, _)), Some((ddp, _)), Some((single, _))) = (fsdp, ddp, single)
        && let (Some(fsdp), Some(ddp), Some(single)) = (peak(fsdp), peak(ddp), peak(single))
    {
        let kept =
            |usage: gpt2::memory::Usage| (usage.parameters.peak + usage.gradients.peak + usage.optimizer.peak) as f64;
        said.push(format!(
            "Memory: the peak of the rank that takes most is {:.1} MB with fsdp, {:.1} MB with ddp and {:.1} MB with single. Parameters, \
             gradients and optimizer state alone (each at its peak) take {} with fsdp of what they take with ddp. DDP keeps all of them on \
             every rank and divides only the activations.",
            fsdp.total.peak as f64 / 1e6,
            ddp.total.peak as f64 / 1e6,
            single.total.peak as f64 / 1e6,
            times(kept(fsdp) / kept(ddp))
        ));
    }
    let quartiles = |row: Option<(&Row, &Run)>| row?.0.quartiles();
    let of_both = quartiles(fsdp).zip(quartiles(ddp));
    let speed = |row: Option<(&Row, &Run)>| row.map(|(row, summary)| (summary.tokens_per_s, row.ranks as f64));
    if let (Some((one, _)), Some((ddp, ranks)), Some((fsdp, _))) = (speed(single), speed(ddp), speed(fsdp)) {
        let told = of_both.map_or("too few steps to tell", |(of, over)| verdict(fsdp / ddp, of, over));
        said.push(format!(
            "Throughput: ddp has {} of single's on {ranks:.0} ranks and fsdp {}; of ddp's fsdp has {} ({told}). For each device single has \
             {one:.0} tokens a second and ddp {:.0}. For the same text a higher throughput means a shorter training; a single device can \
             have a higher throughput and yet train longer only if throughput is counted for each device.",
            times(ddp / one),
            times(fsdp / one),
            times(fsdp / ddp),
            ddp / ranks
        ));
    }
    let apart = |of: fn(&Row) -> Option<f64>| rows.iter().filter_map(of).fold(0.0, f64::max);
    said.push(format!(
        "Gradient norms and losses: in the first steps both agree with single's within {:.0e} (losses) and {:.0e} (norms). The strategies \
         compute the same, so if gradients are more stable with one of them, then batch, learning rate or precision differ as well.",
        apart(|row| row.loss_difference),
        apart(|row| row.norm_difference)
    ));
    let last: Vec<String> = rows
        .iter()
        .filter_map(|row| {
            let last = epochs.iter().rfind(|epoch| epoch.row == row.name)?;
            Some(format!("{} {}", row.name, number(last.validation_loss, 4)))
        })
        .collect();
    said.push(format!("Validation losses after the last epoch: {}.", last.join(", ")));
    said.join(" ")
}

fn caveats(settings: &Settings) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut said = format!(
        "What this run cannot show. It has one run of each row, over {} on one machine with {cores} cores; other load on the machine is \
         part of the figures. Memory is the peak of the run, not of each epoch.",
        settings.transport
    );
    if !settings.full {
        said.push_str(&format!(
            " The model has {:.1} M parameters; compared with them activations and buffers are larger than with GPT-2's 124 M. The text is \
             read byte by byte (--full has the paper's size).",
            settings.model.parameter_count() as f64 / 1e6
        ));
    }
    said
}

fn draw(rows: &[Row], epochs: &[Epoch], settings: &Settings) -> Result<Vec<String>, BenchError> {
    let out = &settings.out;
    let mut written = Vec::new();
    let line = |number: usize, row: &Row, name: String, dashed: bool, of: &dyn Fn(&Epoch) -> Option<f64>| Line {
        name,
        points: epochs
            .iter()
            .filter(|epoch| epoch.row == row.name)
            .filter_map(|epoch| Some((epoch.epoch as f64, of(epoch)?)))
            .collect(),
        // Black is hidden by what lies on it.
        colour: [1, 4, 3][number % 3],
        dashed,
        // What the rows agree in lies on each other.
        width: [7.0, 4.0, 2.0][number % 3],
    };
    let simple = |title, y, of: &dyn Fn(&Epoch) -> Option<f64>| {
        let lines: Vec<Line> =
            rows.iter().enumerate().map(|(number, row)| line(number, row, row.name.clone(), false, of)).collect();
        plot::lines(&Labels { title, x: "epoch", y }, &lines, true)
    };
    let throughput = simple("Throughput by epoch", "tokens a second, all ranks", &|epoch| epoch.tokens_per_s);
    picture(out, "throughput.svg", throughput, &mut written)?;
    let norms =
        simple("Gradient norm by epoch", "global gradient norm, mean of the epoch", &|epoch| Some(epoch.gradient_norm));
    picture(out, "gradient-norm.svg", norms, &mut written)?;
    let time = simple("Training time by epoch", "time of the epoch's steps (s)", &|epoch| epoch.seconds);
    picture(out, "time.svg", time, &mut written)?;
    let mut losses: Vec<Line> = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        losses.push(line(number, row, format!("{}, training", row.name), false, &|epoch| Some(epoch.training_loss)));
        losses.push(line(number, row, format!("{}, validation", row.name), true, &|epoch| epoch.validation_loss));
    }
    let labels = Labels { title: "Loss by epoch", x: "epoch", y: "loss (nats a token)" };
    picture(out, "loss.svg", plot::lines(&labels, &losses, true), &mut written)?;
    let memory = Bars {
        title: "Memory of the rank that takes most",
        value: "MB, each purpose at its own peak",
        parts: Category::ALL.map(|category| category.name().to_string()).to_vec(),
        groups: rows
            .iter()
            .filter_map(|row| {
                let (_, usage) = row.fullest()?;
                Some((row.name.clone(), by_purpose(&usage).map(|bytes| Some(bytes / 1e6)).to_vec()))
            })
            .collect(),
        stacked: true,
    };
    picture(out, "memory.svg", plot::bars(&memory), &mut written)?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use gpt2::trainer::TrainConfig;

    use super::*;

    /// A row of four steps in two epochs, of which the second has a validation before it.
    fn row() -> (Row, Run) {
        let run = Run {
            steps: 4,
            final_loss: 2.0,
            validation_loss: Some(2.5),
            validations: vec![(2, 3.5), (4, 2.5)],
            losses: vec![5.0, 4.0, 3.0, 2.0],
            grad_norms: vec![1.0, 3.0, 2.0, 2.0],
            epochs: vec![1, 1, 2, 2],
            seconds: vec![1.0, 2.0, 9.0, 10.0],
            ..Run::default()
        };
        let config =
            TrainConfig { global_batch: 4, ..TrainConfig::of(Preset::Micro.config(256), StrategyKind::Single) };
        let row = Row {
            name: "single".into(),
            paper: "",
            transport: "none".into(),
            ranks: 1,
            threads_per_rank: 1,
            parameter_servers: None,
            config,
            status: "ok".into(),
            problems: Vec::new(),
            loss_difference: None,
            norm_difference: None,
            summary: None,
        };
        (row, run)
    }

    #[test]
    fn epochs_leave_validation_out_of_their_time() {
        let (row, summary) = row();
        let epochs = epochs(&row, &summary);
        assert_eq!(epochs.len(), 2);
        for (epoch, loss, validation) in [(&epochs[0], 4.5, 3.5), (&epochs[1], 2.5, 2.5)] {
            assert_eq!(epoch.seconds, Some(2.0));
            assert_eq!(epoch.tokens_per_s, Some(4.0 * 32.0));
            assert_eq!((epoch.training_loss, epoch.validation_loss), (loss, Some(validation)));
            assert_eq!(epoch.gradient_norm, 2.0);
        }
        assert_eq!(epochs[0].largest_gradient_norm, 3.0);
    }
}
