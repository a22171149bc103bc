//! Rows of measured memory, and what follows from them.

use gpt2::memory::{Category, Usage};
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use rig::record::Record;
use rig::text::columns;
use rig::training::outcome;
use serde::Serialize;

use super::case::Case;
use super::options::Settings;
use super::theory::{self, Bounds, JUDGED};

/// Recomputation keeps a block's input, of about seventeen times as much, and the activations of one block at a time.
const MOST_RECOMPUTED: f64 = 0.5;

/// 16-bit computation halves what is kept; on its way a layer's values are in f32.
const MOST_16_BIT: f64 = 0.75;

/// A run's line.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    kind: &'static str,
    strategy: String,
    ranks: usize,
    precision: Precision,
    recompute: bool,
    /// Peak bytes of each category, each on the rank where it is largest.
    peaks: Vec<Peak>,
    /// Of all categories together, likewise.
    total: Option<u64>,
    peak_rss_bytes: Option<u64>,
    weights_hash: Option<String>,
    /// Whether every category is within its bound.
    pub(super) holds: bool,
    /// `ok`, or why there are no figures.
    status: String,
    #[serde(skip)]
    case: Case,
}

#[derive(Clone, Debug, Serialize)]
struct Peak {
    category: Category,
    bytes: u64,
    bound: Option<u64>,
}

impl Row {
    /// The line of a record.
    ///
    /// # Errors
    /// Its cell names what there is not.
    pub(super) fn of(record: &Record, settings: &Settings) -> Result<Self, String> {
        let case = Case::of(&record.cell)?;
        let bounds = theory::bounds(&settings.segments, case);
        // What was sent is no matter of memory.
        let measured = match outcome(record) {
            Ok(measured) => measured,
            Err(why) => return Ok(Row::failed(case, &bounds, why)),
        };
        let usages: Vec<Usage> = measured.ranks.iter().filter_map(|rank| rank.trained.as_ref()?.memory).collect();
        if usages.len() != case.ranks {
            return Ok(Row::failed(case, &bounds, "not every rank counted its memory".into()));
        }
        let most = |of: &dyn Fn(&Usage) -> u64| usages.iter().map(of).max().unwrap_or(0);
        let peak = |category: Category| Peak {
            category,
            bytes: most(&|usage| usage.of(category).peak),
            bound: bounds.of(category),
        };
        let peaks = Category::ALL.map(peak).to_vec();
        Ok(Row {
            holds: peaks.iter().all(|peak| peak.bound.is_none_or(|bound| peak.bytes <= bound)),
            peaks,
            total: Some(most(&|usage| usage.total.peak)),
            peak_rss_bytes: measured.ranks.iter().map(|rank| rank.peak_rss_bytes).max(),
            weights_hash: Some(measured.weights_hash.clone()),
            ..Row::failed(case, &bounds, "ok".into())
        })
    }

    fn failed(case: Case, bounds: &Bounds, status: String) -> Self {
        let peak = |category: Category| Peak { category, bytes: 0, bound: bounds.of(category) };
        Row {
            kind: "memory",
            strategy: case.strategy.to_string(),
            ranks: case.ranks,
            precision: case.precision,
            recompute: case.recompute,
            peaks: JUDGED.map(peak).to_vec(),
            total: None,
            peak_rss_bytes: None,
            weights_hash: None,
            holds: false,
            status,
            case,
        }
    }

    fn bound(&self, category: Category) -> Option<u64> {
        self.peaks.iter().find(|peak| peak.category == category).and_then(|peak| peak.bound)
    }

    fn exceeds(&self, category: Category) -> bool {
        self.peak(category).zip(self.bound(category)).is_some_and(|(peak, bound)| peak > bound)
    }

    fn peak(&self, category: Category) -> Option<u64> {
        self.total?;
        self.peaks.iter().find(|peak| peak.category == category).map(|peak| peak.bytes)
    }
}

/// Something that has to follow from two runs.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Verdict {
    kind: &'static str,
    what: String,
    pub(super) holds: bool,
}

fn mib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}

/// Strategies one after the other, in the order in which they come first; then recomputation and 16-bit computation.
pub(super) fn sort(rows: &mut [Row]) {
    let mut strategies: Vec<StrategyKind> = Vec::new();
    for row in rows.iter() {
        if !strategies.contains(&row.case.strategy) {
            strategies.push(row.case.strategy);
        }
    }
    rows.sort_by_key(|row| {
        let plain = !row.recompute && row.precision == Precision::F32;
        (!plain, strategies.iter().position(|strategy| *strategy == row.case.strategy))
    });
}

/// A line for each run.
pub(super) fn table(rows: &[Row]) -> String {
    const HEADER: [&str; 15] = [
        "strategy",
        "computes in",
        "ranks",
        "parameters",
        "bound",
        "gradients",
        "bound",
        "optimizer",
        "bound",
        "activations",
        "communication",
        "other",
        "together",
        "resident",
        "",
    ];
    let figure = |bytes: Option<u64>| bytes.map_or("-".into(), mib);
    let lines: Vec<[String; 15]> = rows
        .iter()
        .map(|row| {
            let peak = |category: Category| {
                let mark = if row.exceeds(category) { " !" } else { "" };
                figure(row.peak(category)) + mark
            };
            let bound = |category: Category| figure(row.bound(category));
            [
                row.strategy.clone(),
                row.case.how().to_string(),
                row.ranks.to_string(),
                peak(Category::Parameters),
                bound(Category::Parameters),
                peak(Category::Gradients),
                bound(Category::Gradients),
                peak(Category::Optimizer),
                bound(Category::Optimizer),
                peak(Category::Activations),
                peak(Category::Communication),
                peak(Category::Other),
                figure(row.total),
                figure(row.peak_rss_bytes),
                match (&*row.status, row.holds) {
                    ("ok", true) => "within".into(),
                    ("ok", false) => "EXCEEDED".into(),
                    (why, _) => why.to_string(),
                },
            ]
        })
        .collect();
    format!(
        "peak memory of a rank in MiB, from the first step to the last, by purpose; each figure is that of the rank where it is largest\n\
         (each purpose has its peak at another moment; resident is the most memory that the process ever held, with the program itself and \
         its start)\n\
         \n\
         {}",
        columns(&HEADER, &lines, 2)
    )
}

/// The controls, and what recomputation and 16-bit computation save.
pub(super) fn verdicts(settings: &Settings, rows: &[Row]) -> Vec<Verdict> {
    let find = |strategy, ranks, precision, recompute| {
        rows.iter().find(|row| row.case == Case { strategy, ranks, precision, recompute })
    };
    let most = settings.ranks.iter().copied().max().unwrap_or(1);
    let mut verdicts = Vec::new();
    if most > 1
        && let Some(ddp) = find(StrategyKind::Ddp, most, Precision::F32, false)
    {
        for (strategy, category) in [
            (StrategyKind::Zero1, Category::Optimizer),
            (StrategyKind::Zero2, Category::Gradients),
            (StrategyKind::Fsdp, Category::Parameters),
        ] {
            let bounds = theory::bounds(&settings.segments, Case { strategy, ..ddp.case });
            let Some((bytes, bound)) = ddp.peak(category).zip(bounds.of(category)) else { continue };
            verdicts.push(Verdict {
                kind: "control",
                what: format!(
                    "ddp on {most} ranks takes {} MiB of {}, which is more than the bound of {strategy}, {} MiB",
                    mib(bytes),
                    category.name(),
                    mib(bound)
                ),
                holds: bytes > bound,
            });
        }
    }
    for strategy in [StrategyKind::Ddp, StrategyKind::Fsdp] {
        let Some(plain) = find(strategy, most, Precision::F32, false) else { continue };
        let mut compare = |other: Option<&Row>, what: &str, category: Category, bound: f64| {
            let pair = plain.peak(category).zip(other.and_then(|other| other.peak(category)));
            let Some((before, after)) = pair else { return };
            let share = after as f64 / before as f64;
            verdicts.push(Verdict {
                kind: "effect",
                what: format!(
                    "{strategy} on {most} ranks, {what}: {} fall from {} to {} MiB, which is {:.0} % (the bound is {:.0} %)",
                    category.name(),
                    mib(before),
                    mib(after),
                    100.0 * share,
                    100.0 * bound
                ),
                holds: share <= bound,
            });
        };
        let recomputed = find(strategy, most, Precision::F32, true);
        compare(recomputed, "recomputation", Category::Activations, MOST_RECOMPUTED);
        let narrow = find(strategy, most, Precision::Bf16, false);
        compare(narrow, "bf16", Category::Activations, MOST_16_BIT);
        // By what each of the two may take.
        let may = |row: &Row| row.bound(Category::Parameters).map(|bytes| bytes as f64);
        if strategy == StrategyKind::Ddp
            && let Some((in_16_bit, in_f32)) = narrow.and_then(may).zip(may(plain))
        {
            compare(narrow, "bf16", Category::Parameters, in_16_bit / in_f32);
        }
        if let Some(recomputed) = recomputed {
            verdicts.push(Verdict {
                kind: "effect",
                what: format!("{strategy} on {most} ranks, recomputation: the weights are bit-identical"),
                holds: recomputed.weights_hash.is_some() && recomputed.weights_hash == plain.weights_hash,
            });
        }
    }
    verdicts
}

/// One line each.
pub(super) fn sentences(verdicts: &[Verdict]) -> String {
    let line = |verdict: &Verdict| format!("{}  {}", if verdict.holds { "yes" } else { "NO " }, verdict.what);
    verdicts.iter().map(line).collect::<Vec<_>>().join("\n")
}
