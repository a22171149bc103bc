//! `bench paper bai`: H. Bai, "Modern Distributed Data-Parallel Large-Scale Pre-training Strategies For NLP models", HP3C 2022
//! (arXiv 2206.06356).
//!
//! Of the paper its abstract could be read, and its code: github.com/BiEchi/DistributedTrainingGPT2 at commit 29a5effc. What stands in
//! [`ORIGINAL`] comes from the `train.py`, `train.sh` and `config/model_config.json` there.

use gpt2::cli::say;
use gpt2::config::Preset;
use gpt2::memory::Category;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use rig::BenchError;
use rig::plot::{self, Bars, Labels, Line};
use rig::record::Axis;

use super::options::{BaiArgs, Mixed, Settings, Size};
use super::row::{RankRun, Row, Run, Variant, by_purpose};
use super::rows::{measure, measured, picture, say_files};
use super::text::{by_rank, number, paragraph, table, times, verdict};
use crate::plan::Draft;

/// Four devices, 512 tokens, four sequences a device: the code's runs on one node with Apex.
const FULL: Size = Size {
    preset: Preset::Gpt2,
    block_size: Some(512),
    ranks: 4,
    batch: 16,
    tokenizer: TokenizerKind::Gpt2,
    row_timeout: 7 * 24 * 3600,
};

/// Training losses that a point of the curve is the mean of.
const SMOOTHED: usize = 10;

/// One device, a parameter server, a distributed one, Horovod.
const SINGLE: &str = "Single GPU";
const PS: &str = "Single Parameter Server";
const SHARDED: &str = "Distributed Parameter Server";
const HOROVOD: &str = "Horovod";
const SHARDED_APEX: &str = "Distributed Parameter Server with Apex";
const HOROVOD_APEX: &str = "Horovod with Apex";

/// What the original ran: the paper's name, what its code does, devices, sequences a step in all, learning rate, epochs, precision, when
/// gradients are clipped, and optimizer steps a step.
const ORIGINAL: [[&str; 9]; 6] = [
    [SINGLE, "no script of its own found", "-", "-", "-", "-", "-", "-", "-"],
    [PS, "DataParallel, one process", "4", "4", "1.5e-4", "400", "f32", "after averaging", "1"],
    [SHARDED, "DistributedDataParallel", "4", "8", "0.75e-4", "800", "f32", "after averaging", "1"],
    [HOROVOD, "hvd.DistributedOptimizer", "8 on 2 nodes", "32", "1.5e-4", "4000", "f32", "before averaging ends", "1"],
    [
        SHARDED_APEX,
        "Apex's DistributedDataParallel",
        "4",
        "16",
        "1.5e-4",
        "800",
        "f16, Apex O2",
        "after averaging",
        "1",
    ],
    [HOROVOD_APEX, "hvd.DistributedOptimizer", "4", "16", "1.5e-4", "4000", "f16, Apex O1", "after averaging", "2"],
];

/// Runs the rows and says what there is to say.
pub(super) fn run(args: &BaiArgs) -> Result<Vec<Row>, BenchError> {
    let full = args.common.is_full();
    let steps = args.steps.unwrap_or(if full { 200 } else { 120 });
    if steps == 0 {
        return Err("--steps must be at least 1".into());
    }
    let settings = args.common.check(if full { &FULL } else { &Size::SMALL })?;
    let draft = draft(&settings, steps, args.mixed)?;
    settings.batches(&draft)?;
    settings.introduce("Bai 2022 (HP3C; arXiv 2206.06356), repeated under equal conditions", &format!("{steps} steps"));
    say_stated(full);
    let rows = measure(&settings, &draft, &variants(args.mixed))?;
    say_tables(&rows);
    say(format_args!("\n{}", paragraph(UNFAIR)));
    say(format_args!("\n{}", table(&ORIGINAL_HEADER, &ORIGINAL.map(|line| line.map(String::from).to_vec()), 2)));
    say(format_args!("\n{}", paragraph(&fair(&rows, &settings))));
    say_findings(&rows);
    say(format_args!("\n{}", paragraph(&caveats(&settings, args.mixed))));
    let pictures = draw(&rows, &settings)?;
    say_files(&settings, &["rows.jsonl", "results.jsonl (records, with every step and rank)"], &pictures);
    Ok(rows)
}

fn draft(settings: &Settings, steps: u64, mixed: Mixed) -> Result<Draft, String> {
    let schedule = if settings.full {
        // The code warms up for 2000 steps, which would be all of a short run.
        format!("linear 0.00015 0 {} {steps}", (steps / 20).min(2000))
    } else {
        format!("cosine 0.001 0.0001 {} {}", (steps / 20).min(5), steps.max(10))
    };
    let mut draft = Draft::ready("bai")?;
    settings.put(&mut draft);
    draft
        .set(Axis::Steps, &[steps])
        .set(Axis::ValidateEvery, &[steps])
        .set(Axis::Schedule, &[schedule])
        // A dedicated server is one more rank.
        .set_also(Axis::Ranks, &[settings.ranks + 1])
        .set_also(Axis::Precision, &[mixed.precision()])
        .set_also(Axis::Wire, &[mixed.precision()])
        .set_also(Axis::LossScaling, &[mixed.loss_scaling()]);
    Ok(draft)
}

/// The paper's six, the dedicated server, and what the paper's code runs under the name of a distributed server.
fn variants(mixed: Mixed) -> Vec<Variant> {
    let in_mixed = |variant: Variant| Variant {
        name: format!("{}, {}", variant.name, mixed.precision()),
        precision: mixed.precision(),
        ..variant
    };
    let ddp = Variant::new(StrategyKind::Ddp, "(as its code has it)");
    vec![
        Variant::new(StrategyKind::Single, SINGLE),
        Variant::new(StrategyKind::Ps, PS),
        Variant {
            name: "ps, dedicated".into(),
            dedicated: true,
            ..Variant::new(StrategyKind::Ps, "(not in the paper)")
        },
        Variant::new(StrategyKind::ShardedPs, SHARDED),
        ddp.clone(),
        Variant::new(StrategyKind::Ring, HOROVOD),
        in_mixed(Variant::new(StrategyKind::ShardedPs, SHARDED_APEX)),
        in_mixed(ddp),
        in_mixed(Variant::new(StrategyKind::Ring, HOROVOD_APEX)),
    ]
}

fn say_stated(full: bool) {
    say(paragraph(
        "What the paper states: GPT-2 with 100M parameters, PyTorch, six strategies (abstract). What its code states: 12 layers, 12 heads, \
         width 768, sequences of 512 tokens, a Chinese vocabulary of 26 651 or 26 679 tokens, AdamW with a linear warm-up of 2000 steps, \
         gradients clipped to a norm of 1, nodes with 4 V100. Not found: the text, the figures of the paper's tables, the constants of \
         AdamW (so those of its library), and any script of the run on one device.",
    ));
    if full {
        say(paragraph(
            "--full takes from that the model but for its vocabulary (GPT-2's 50 257 tokens, so 124M parameters), 512 tokens, 4 devices, 16 \
             sequences a step (the code's own on one node with Apex), the learning rate of 1.5e-4 and clipping; the warm-up is shortened \
             with --steps; AdamW has this program's constants.",
        ));
    }
    say("");
}

fn say_tables(rows: &[Row]) {
    say_speed(rows);
    say_memory(rows);
    say_work(rows);
}

fn say_speed(rows: &[Row]) {
    let single = rows.first().and_then(|row| row.summary.as_ref());
    let speed: Vec<Vec<String>> = measured(rows)
        .map(|(row, summary)| {
            let exposed = summary.ranks.iter().map(|rank| rank.parts.exposed + rank.parts.scalars).fold(0.0, f64::max);
            vec![
                row.name.clone(),
                row.paper.into(),
                row.parameter_servers.map_or("-".into(), |servers| servers.to_string()),
                row.ranks.to_string(),
                format!("{:.0}", summary.tokens_per_s),
                number(single.map(|single| summary.tokens_per_s / single.tokens_per_s), 2),
                number(Some(summary.step_ms), 1),
                number(Some(exposed), 1),
                number(row.seconds(), 1),
                by_rank(summary.ranks.iter().map(|rank| format!("{:.0}", 100.0 * rank.cpu_utilization))),
                by_rank(summary.ranks.iter().map(|rank| number(rank.gpu_utilization, 0))),
                number(Some(summary.final_loss), 4),
                number(summary.validation_loss, 4),
            ]
        })
        .collect();
    let header = [
        "row",
        "in the paper",
        "servers",
        "ranks",
        "tokens/s",
        "of single",
        "step ms",
        "exposed ms",
        "train s",
        "CPU %",
        "GPU %",
        "loss",
        "val. loss",
    ];
    say(format_args!("\nspeed, utilisation by rank, loss\n{}", table(&header, &speed, 2)));
    say(
        "exposed: how long a step waits for other ranks, on the rank that waits longest; CPU %: processor time divided by wall time and threads",
    );
}

fn say_memory(rows: &[Row]) {
    let mut header = vec!["row", "in the paper", "all"];
    header.extend(Category::ALL.map(Category::name));
    header.push("RSS");
    let memory: Vec<Vec<String>> = measured(rows)
        .filter_map(|(row, summary)| {
            let (_, usage) = row.fullest()?;
            let mut line = vec![row.name.clone(), row.paper.into(), megabytes(usage.total.peak as f64)];
            line.extend(by_purpose(&usage).map(megabytes));
            let resident = summary.ranks.iter().map(|rank| rank.peak_rss_bytes).max().unwrap_or(0);
            line.push(megabytes(resident as f64));
            Some(line)
        })
        .collect();
    say(format_args!(
        "\npeak memory during training in MB, of the rank that takes most\n{}",
        table(&header, &memory, 2)
    ));
    say(
        "each purpose has its peak at another moment, so they add up to more than `all`; RSS: the whole process, with program, text and start",
    );
}

/// Operations, bytes and optimizer steps, counted and by formula.
fn say_work(rows: &[Row]) {
    let header = [
        "row",
        "operations/step",
        "formula",
        "MB sent/step",
        "formula",
        "optimizer steps",
        "of steps",
        "first losses differ",
        "status",
    ];
    let work: Vec<Vec<String>> = measured(rows)
        .map(|(row, summary)| {
            let of = |each: &dyn Fn(&RankRun) -> String| by_rank(summary.ranks.iter().map(each));
            vec![
                row.name.clone(),
                of(&|rank| rank.operations.to_string()),
                of(&|rank| rank.operations_expected.to_string()),
                of(&|rank| number(rank.bytes_counted.map(|bytes| bytes as f64 / 1e6), 3)),
                of(&|rank| number(Some(rank.bytes_expected as f64 / 1e6), 3)),
                of(&|rank| optimizer_steps(rank)),
                summary.steps.to_string(),
                row.loss_difference.map_or("-".into(), |difference| format!("{difference:.1e}")),
                row.status.clone(),
            ]
        })
        .collect();
    say(format_args!(
        "\ncounts of each rank, compared with the strategy's definition (ranks that differ are separated by a slash)"
    ));
    say(table(&header, &work, 1));
    let skipped: Vec<String> = measured(rows)
        .filter(|(_, summary)| summary.skipped_steps > 0)
        .map(|(row, summary)| format!("{}: {}", row.name, summary.skipped_steps))
        .collect();
    if !skipped.is_empty() {
        say(format_args!("steps skipped by loss scaling, without an update, on all ranks: {}", skipped.join("; ")));
    }
}

fn optimizer_steps(rank: &RankRun) -> String {
    let (fewest, most) = rank.optimizer_steps;
    if fewest == most { most.to_string() } else { format!("{fewest}..{most}") }
}

fn megabytes(bytes: f64) -> String {
    format!("{:.1}", bytes / 1e6)
}

const ORIGINAL_HEADER: [&str; 9] = [
    "in the paper",
    "what its code runs",
    "GPUs",
    "sequences/step",
    "rate",
    "epochs",
    "precision",
    "clipped",
    "optimizer steps",
];

const UNFAIR: &str = "Where the original comparison was unfair. Its strategies are separate scripts that differ in more than the strategy: \
    4 to 32 sequences a step, with a learning rate that is adapted to this in only one of them; other numbers of devices and epochs; Apex \
    at O2 in one and O1 in another. With Horovod in f32 gradients are clipped on each rank while they are still being averaged. With \
    Horovod and Apex the optimizer steps twice for each batch. What it calls parameter servers is DataParallel (one process that scatters \
    the model and the batch and gathers gradients on GPU 0; the nearest strategy here is ps) and DistributedDataParallel (all-reduce, no \
    server; here ddp).";

/// What was the same in all rows.
fn fair(rows: &[Row], settings: &Settings) -> String {
    let held = rows.iter().filter(|row| row.is_sound()).count();
    let exact = measured(rows).filter(|(row, _)| row.config.precision == Precision::F32);
    let most = exact.filter_map(|(row, _)| row.loss_difference).fold(0.0, f64::max);
    format!(
        "What this run does instead: one loop for every strategy, seed {}, the same order of the data, {} sequences a step over all ranks, \
         one schedule, clipping after averaging, and one update a step. For {held} of {} rows it was checked that configurations differ \
         only in strategy and precision, that every rank's optimizer took one step in each step, that operations, messages and bytes are \
         those of the formula on every rank in every step, and that the first losses equal single's (f32: within {most:.0e}). All ranks of \
         a row ended with the same weights.",
        settings.seed,
        settings.batch,
        rows.len()
    )
}

/// The paper's conclusions beside this run's figures.
fn say_findings(rows: &[Row]) {
    say(format_args!(
        "\n{}",
        paragraph(
            "What this run finds. The paper concludes (abstract) that the distributed parameter server with Apex performs best on a single \
             node, and that Horovod with Apex is the most robust on one or several nodes. Here, by tokens a second:"
        )
    ));
    let of = |kind, mixed| find(rows, kind, false, mixed);
    let (single, ps) = (of(StrategyKind::Single, false), of(StrategyKind::Ps, false));
    let (sharded, ring, ddp) =
        (of(StrategyKind::ShardedPs, false), of(StrategyKind::Ring, false), of(StrategyKind::Ddp, false));
    let pairs = [
        ("ring (Horovod) over ps (single parameter server)", ring, ps),
        ("sharded-ps (distributed parameter server) over ps", sharded, ps),
        ("ring over sharded-ps", ring, sharded),
        ("ddp (what the paper's code calls a distributed server) over sharded-ps", ddp, sharded),
        (
            "a dedicated server, which is one more process, over one that computes",
            find(rows, StrategyKind::Ps, true, false),
            ps,
        ),
        ("sharded-ps in mixed precision over f32", of(StrategyKind::ShardedPs, true), sharded),
        ("ddp in mixed precision over f32", of(StrategyKind::Ddp, true), ddp),
        ("ring in mixed precision over f32", of(StrategyKind::Ring, true), ring),
        (
            "ring in mixed precision over sharded-ps in mixed precision",
            of(StrategyKind::Ring, true),
            of(StrategyKind::ShardedPs, true),
        ),
        ("ring on all ranks over one device", ring, single),
    ];
    let lines: Vec<Vec<String>> = pairs
        .into_iter()
        .filter_map(|(what, a, b)| {
            let ((a, a_summary), (b, b_summary)) = (a?, b?);
            let ratio = a_summary.tokens_per_s / b_summary.tokens_per_s;
            let told = verdict(ratio, a.quartiles()?, b.quartiles()?);
            Some(vec![format!("  {what}"), format!("{}: {told}", times(ratio))])
        })
        .collect();
    say(table(&["", "speed"], &lines, 2));
    let mut said: Vec<String> = Vec::new();
    said.extend(fastest_and_concluded(rows));
    said.extend(final_losses(rows));
    let busiest = |summary: &Run| summary.ranks.iter().map(|rank| rank.bytes_expected).max();
    if let (Some((_, ps)), Some((_, sharded))) = (ps, sharded)
        && let (Some(one), Some(many)) = (busiest(ps), busiest(sharded))
    {
        said.push(format!(
            "A single server sends {:.2} MB a step, N-1 times the model for N ranks; the busiest of the distributed servers sends {:.2} \
             MB, less than twice the model for any N. So the two differ from 3 ranks on.",
            one as f64 / 1e6,
            many as f64 / 1e6
        ));
    }
    say(format_args!("\n{}", paragraph(&said.join(" "))));
}

/// The row of a strategy, with a dedicated server or without, in mixed precision or in f32.
fn find(rows: &[Row], kind: StrategyKind, dedicated: bool, mixed: bool) -> Option<(&Row, &Run)> {
    measured(rows).find(|(Row { config, .. }, _)| {
        config.strategy == kind
            && config.options.dedicated_server == dedicated
            && (config.precision != Precision::F32) == mixed
    })
}

/// The fastest row beside the one that the paper concludes is best on a single node.
fn fastest_and_concluded(rows: &[Row]) -> Option<String> {
    let fastest = measured(rows).max_by(|(_, a), (_, b)| a.tokens_per_s.total_cmp(&b.tokens_per_s));
    let ((row, summary), (concluded, its_summary)) = (fastest?, find(rows, StrategyKind::ShardedPs, false, true)?);
    if row.name == concluded.name {
        return Some(format!("Fastest here is {}, as the paper concludes for a single node.", row.name));
    }
    let ratio = summary.tokens_per_s / its_summary.tokens_per_s;
    let told = row.quartiles().zip(concluded.quartiles()).map(|(of, over)| verdict(ratio, of, over));
    Some(format!(
        "Fastest here is {} with {:.0} tokens/s; {}, which the paper concludes is best on a single node, has {:.0} (ratio {}, {}).",
        row.name,
        summary.tokens_per_s,
        concluded.name,
        its_summary.tokens_per_s,
        times(ratio),
        told.unwrap_or("too few steps to tell")
    ))
}

/// Whether strategies learn alike.
fn final_losses(rows: &[Row]) -> Option<String> {
    let finals = |mixed: bool| {
        let losses = measured(rows)
            .filter(move |(row, _)| (row.config.precision != Precision::F32) == mixed)
            .map(|(_, summary)| summary.final_loss);
        let low = losses.clone().fold(f64::INFINITY, f64::min);
        let high = losses.fold(f64::NEG_INFINITY, f64::max);
        (low <= high).then_some((low, high))
    };
    let ((low, high), (mixed_low, mixed_high)) = (finals(false)?, finals(true)?);
    Some(format!(
        "Under equal conditions all strategies reach similar losses: final losses are {low:.4} to {high:.4} in f32 and {mixed_low:.4} to \
             {mixed_high:.4} in mixed precision; if a comparison shows different losses at the same step, its conditions were not equal."
    ))
}

fn caveats(settings: &Settings, mixed: Mixed) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut said = vec![format!(
        "What this run cannot show. It has one run of each row, over {} on one machine with {cores} cores. So a difference is stated only \
         if the quartiles of the step times do not overlap, and other load on the machine is part of the figures. With a single node it \
         says nothing about robustness on several nodes.",
        settings.transport
    )];
    said.push(format!(
        "A dedicated server makes {} processes of {} thread(s) each on these cores.",
        settings.ranks + 1,
        settings.threads
    ));
    said.push(match mixed {
        Mixed::Bf16 => "Mixed precision is bf16 with f32 masters and needs no loss scaling (--mixed f16 uses it, like Apex). A CPU \
             converts bf16 to f32 to compute, so its arithmetic is not faster, whereas the V100 of the paper multiplies f16 several times \
             faster than f32. The bytes sent are halved in both cases."
            .into(),
        Mixed::F16 => "Mixed precision is f16 with f32 masters and dynamic loss scaling. A CPU converts f16 to f32 to compute, so its \
             arithmetic is not faster, whereas the V100 of the paper multiplies f16 several times faster than f32. The bytes sent are \
             halved in both cases."
            .to_string(),
    });
    if !settings.full {
        said.push(format!(
            "The model has {:.1} M parameters, not 100 M, and the text is read byte by byte (--full has the paper's size).",
            settings.model.parameter_count() as f64 / 1e6
        ));
    }
    said.join(" ")
}

fn draw(rows: &[Row], settings: &Settings) -> Result<Vec<String>, BenchError> {
    let one = |title, value, of: &dyn Fn(&Row, &Run) -> Option<f64>| {
        let groups = measured(rows).map(|(row, summary)| (row.name.clone(), vec![of(row, summary)])).collect();
        plot::bars(&Bars { title, value, parts: vec![String::new()], groups, stacked: false })
    };
    let speed = one("Throughput", "tokens a second, all ranks", &|_, summary| Some(summary.tokens_per_s));
    let mut written = Vec::new();
    for (name, drawn) in [
        ("loss-against-time.svg", loss_against_time(rows)),
        ("throughput.svg", speed),
        ("utilisation.svg", utilisation(rows)),
        ("memory.svg", memory(rows)),
        ("operations.svg", operations(rows)),
        ("parameter-servers.svg", parameter_servers(rows)),
    ] {
        picture(&settings.out, name, drawn, &mut written)?;
    }
    Ok(written)
}

fn loss_against_time(rows: &[Row]) -> Result<String, String> {
    // A row in mixed precision has the colour of its strategy, dashed.
    let mut colours: Vec<(&str, bool)> = Vec::new();
    let curves: Vec<Line> = measured(rows)
        .map(|(row, summary)| {
            let key = (row.config.strategy.name(), row.config.options.dedicated_server);
            let colour = colours.iter().position(|other| *other == key).unwrap_or(colours.len());
            if colour == colours.len() {
                colours.push(key);
            }
            let dashed = row.config.precision != Precision::F32;
            Line { name: row.name.clone(), points: smoothed(summary), colour, dashed, width: 2.0 }
        })
        .collect();
    let labels = Labels {
        title: "Loss against time",
        x: "time since the first step (s)",
        y: "training loss, mean of 10 steps (nats a token)",
    };
    plot::lines(&labels, &curves, false)
}

fn utilisation(rows: &[Row]) -> Result<String, String> {
    let most_ranks = rows.iter().map(|row| row.ranks).max().unwrap_or(0);
    let of_ranks = |of: &dyn Fn(&RankRun) -> Option<f64>| -> Vec<(String, Vec<Option<f64>>)> {
        measured(rows).map(|(row, summary)| (row.name.clone(), summary.ranks.iter().map(of).collect())).collect()
    };
    let on_gpu = measured(rows).flat_map(|(_, summary)| &summary.ranks).any(|rank| rank.gpu_utilization.is_some());
    plot::bars(&Bars {
        title: "Utilisation by rank",
        value: if on_gpu { "GPU utilisation (%)" } else { "CPU utilisation (% of the rank's threads)" },
        parts: (0..most_ranks).map(|rank| format!("rank {rank}")).collect(),
        groups: of_ranks(&|rank| if on_gpu { rank.gpu_utilization } else { Some(100.0 * rank.cpu_utilization) }),
        stacked: false,
    })
}

fn memory(rows: &[Row]) -> Result<String, String> {
    plot::bars(&Bars {
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
    })
}

fn operations(rows: &[Row]) -> Result<String, String> {
    let busiest = |summary: &Run, of: fn(&RankRun) -> u64| summary.ranks.iter().map(of).max().map(|most| most as f64);
    plot::bars(&Bars {
        title: "Operations on gradients and parameters",
        value: "operations a step, on the rank with most",
        parts: vec!["counted".into(), "formula".into()],
        groups: measured(rows)
            .map(|(row, summary)| {
                let counted = busiest(summary, |rank| rank.operations);
                (row.name.clone(), vec![counted, busiest(summary, |rank| rank.operations_expected)])
            })
            .collect(),
        stacked: false,
    })
}

fn parameter_servers(rows: &[Row]) -> Result<String, String> {
    let with_servers = measured(rows).filter_map(|(row, summary)| {
        let servers = row.parameter_servers?;
        let kind = if row.config.options.dedicated_server { ", dedicated" } else { "" };
        let of_precision =
            if row.config.precision == Precision::F32 { String::new() } else { format!(", {}", row.config.precision) };
        Some((format!("{servers} server(s){kind}{of_precision}"), vec![Some(summary.tokens_per_s)]))
    });
    plot::bars(&Bars {
        title: "Number of parameter servers",
        value: "tokens a second, all ranks",
        parts: vec![String::new()],
        groups: with_servers.collect(),
        stacked: false,
    })
}

/// Losses over time, each the mean of the last few.
fn smoothed(summary: &Run) -> Vec<(f64, f64)> {
    let mean = |end: usize| {
        let last = &summary.losses[(end + 1).saturating_sub(SMOOTHED)..=end];
        last.iter().sum::<f64>() / last.len() as f64
    };
    let known = summary.losses.len().min(summary.seconds.len());
    (0..known).map(|index| (summary.seconds[index], mean(index))).collect()
}
