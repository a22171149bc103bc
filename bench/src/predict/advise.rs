//! `bench advise`: the strategies in the order of their predicted steps, with the reason.

use std::process::ExitCode;

use gpt2::cli::say;
use gpt2::strategy::StrategyKind;
use rig::BenchError;

use super::alone::can_be_alone;
use super::forecast::{Forecast, ForecastOptions, marked, ms, notes};

/// Predicts the step time of each strategy, and lists the strategies from the fastest to the slowest, with the reason.
///
/// Strategies are compared on the same link, transport and number of ranks. Without --strategies it compares all strategies that can be recorded one
/// rank at a time.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AdviseArgs {
    #[command(flatten)]
    options: ForecastOptions,
}

pub(crate) fn run(args: &AdviseArgs) -> Result<ExitCode, BenchError> {
    let options = &args.options;
    let calibration = options.calibration()?;
    let is_compared = |kind: &StrategyKind| *kind != StrategyKind::Single && can_be_alone(*kind);
    let all: Vec<StrategyKind> = StrategyKind::ALL.into_iter().filter(is_compared).collect();
    let cells = options.cells(&all)?;
    let mut forecasts = options.recorded(&cells, &calibration)?;
    for sentence in advice(&mut forecasts) {
        say(format_args!("{sentence}"));
    }
    for line in notes(&forecasts) {
        say(format_args!("{line}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The advice for each link, transport and number of ranks, the shortest step first.
fn advice(forecasts: &mut [Forecast]) -> Vec<String> {
    let group = |Forecast { cell, .. }: &Forecast| (cell.link.clone(), cell.transport.clone(), cell.ranks);
    let step = |forecast: &Forecast| forecast.prediction.step.value;
    forecasts.sort_by(|a, b| group(a).cmp(&group(b)).then(step(a).total_cmp(&step(b))));
    forecasts.chunk_by(|a, b| group(a) == group(b)).flat_map(sentences).collect()
}

/// Whether a step brings as much as one of a single device.
fn is_one_device(forecast: &Forecast) -> bool {
    forecast.cell.strategy.parse::<StrategyKind>().is_ok_and(|kind| kind.spec().is_one_device)
}

/// The advice for one group. Strategies that compute what one device computes need the same steps for a loss, so that their order by step is that by loss; of the
/// others it is said how many more steps they may need before they are slower.
fn sentences(forecasts: &[Forecast]) -> Vec<String> {
    let best = forecasts.iter().find(|forecast| is_one_device(forecast));
    let mut sentences = Vec::with_capacity(forecasts.len());
    for forecast in forecasts {
        let Forecast { cell, prediction } = forecast;
        let (name, step) = (&cell.strategy, &prediction.step);
        let marked = marked(name.clone(), prediction);
        let mut sentence = format!(
            "{marked} over {} on {} with {} ranks: {:.1} ms a step ({:.1}-{:.1}), {:.0} % of it computing; {}",
            cell.transport,
            cell.link,
            cell.ranks,
            ms(step.value),
            ms(step.low),
            ms(step.high),
            100.0 * prediction.utilization,
            prediction.limit.because()
        );
        if let Some(best) = best {
            let ratio = step.value / best.prediction.step.value;
            let other = &best.cell.strategy;
            if !is_one_device(forecast) {
                let spare = 100.0 * (1.0 / ratio - 1.0);
                sentence += &if spare > 0.0 {
                    format!(
                        "; it reaches a given loss sooner than {other} if it needs less than {spare:.0} % more steps for it"
                    )
                } else {
                    format!("; {other} has shorter steps and needs fewer of them for the same loss")
                };
            } else if best != forecast {
                let sent = (prediction.sent_bytes - best.prediction.sent_bytes) / 1e6;
                let apart = step.low > best.prediction.step.high;
                sentence += &format!("; {ratio:.2} times as long as {other}");
                sentence += &match sent {
                    more if more > 0.01 => format!(", and the busiest rank sends {more:.2} MB more"),
                    less if less < -0.01 => format!(", and the busiest rank sends {:.2} MB less", -less),
                    _ => String::new(),
                };
                sentence += if apart { "" } else { ", a difference within the bounds" };
            }
        }
        sentences.push(sentence);
    }
    sentences
}

#[cfg(test)]
mod tests {
    use predict::prediction::{Estimate, Limit, Prediction};
    use rig::stats::made_up;

    use super::*;

    fn of(strategy: &str, ms: f64, sent_bytes: f64, limit: Limit) -> Forecast {
        let value = ms / 1e3;
        let step = Estimate { value, low: 0.95 * value, high: 1.05 * value };
        let prediction = Prediction {
            step,
            exposed: step,
            utilization: 0.5,
            sent_bytes,
            alpha_beta_s: value,
            limit,
            outside: Vec::new(),
        };
        Forecast { cell: made_up::cell(strategy), prediction }
    }

    #[test]
    fn the_advice_has_an_order_and_a_reason() {
        let forecasts = [
            of("local-sgd", 50.0, 1e6, Limit::Compute),
            of("ddp", 100.0, 1e6, Limit::Compute),
            of("ring", 104.0, 1e6, Limit::Compute),
            of("ps", 200.0, 3e6, Limit::Rate),
        ];
        let text = sentences(&forecasts);
        assert!(text[0].contains("sooner than ddp if it needs less than 100 % more steps"), "{}", text[0]);
        assert!(text[1].contains("100.0 ms a step (95.0-105.0), 50 % of it computing; most of a step is computation"));
        assert!(text[2].ends_with("1.04 times as long as ddp, a difference within the bounds"), "{}", text[2]);
        let expected = "most of a step is limited by the link's rate; 2.00 times as long as ddp, and the busiest rank sends 2.00 MB more";
        assert!(text[3].ends_with(expected), "{}", text[3]);
    }

    #[test]
    fn only_cells_over_the_same_network_are_compared() {
        let over = |link: &str, strategy: &str, ms: f64| {
            let forecast = of(strategy, ms, 1e6, Limit::Rate);
            Forecast { cell: rig::record::Cell { link: link.into(), ..forecast.cell }, ..forecast }
        };
        let mut forecasts = [
            over("wan", "ddp", 400.0),
            over("lan", "ring", 90.0),
            over("wan", "ring", 300.0),
            over("lan", "ddp", 80.0),
        ];
        let text = advice(&mut forecasts);
        let first: Vec<&str> = text.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(first, ["ddp", "ring", "ring", "ddp"]);
        assert!(
            text[1].contains("1.12 times as long as ddp") && text[3].contains("1.33 times as long as ring"),
            "{text:?}"
        );
    }
}
