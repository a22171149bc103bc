//! Figures and tables as text.

use crate::stats::{Ratio, median};

/// Lines under a header; the first `names` columns are names, to the left, the others figures, to the right.
pub fn columns<const N: usize>(header: &[&str; N], lines: &[[String; N]], names: usize) -> String {
    let mut widths = header.map(|name| name.chars().count());
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let join = |cells: &[String; N]| -> String {
        let cells = cells.iter().zip(widths).enumerate().map(|(index, (cell, width))| {
            if index < names { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    let header = header.map(String::from);
    std::iter::once(&header).chain(lines).map(join).collect::<Vec<_>>().join("\n")
}

/// Lines under a header, of any number of columns; the first is a name, to the left, the others are figures, to the right.
pub fn grid(header: &[String], lines: &[Vec<String>]) -> String {
    let all = || std::iter::once(header).chain(lines.iter().map(Vec::as_slice));
    let width = |column: usize| all().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..header.len()).map(|column| width(column).unwrap_or(0)).collect();
    let join = |line: &[String]| {
        let cells = line.iter().zip(&widths).enumerate().map(|(index, (cell, width))| match index {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    all().map(join).collect::<Vec<_>>().join("\n")
}

/// The text with a new line wherever the next word would go beyond this many columns.
pub fn wrapped(text: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_string()),
        }
    }
    lines.join("\n")
}

/// `12.3 (11.9-13.0)`: the median, the least and the most.
pub fn spread(values: &[f64], digits: usize) -> String {
    let least = values.iter().copied().min_by(f64::total_cmp);
    let most = values.iter().copied().max_by(f64::total_cmp);
    match (median(values), least, most) {
        (Some(middle), Some(least), Some(most)) => format!("{middle:.digits$} ({least:.digits$}-{most:.digits$})"),
        _ => "-".into(),
    }
}

/// The median.
pub fn middle(values: &[f64], digits: usize) -> String {
    median(values).map_or("-".into(), |value| format!("{value:.digits$}"))
}

/// A ratio with its spread.
pub fn ratio(ratio: Option<Ratio>) -> String {
    ratio.map_or("-".into(), |Ratio { median, min, max }| format!("{median:.2} ({min:.2}-{max:.2})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_left_and_figures_right() {
        let lines = [["a".to_string(), "1.0".into()], ["long".into(), "10.0".into()]];
        assert_eq!(columns(&["name", "ms"], &lines, 1), "name    ms\na      1.0\nlong  10.0");
    }

    #[test]
    fn long_texts_are_wrapped_between_words_and_grids_take_any_number_of_columns() {
        assert_eq!(wrapped("one two  three four", 9), "one two\nthree\nfour");
        assert_eq!((wrapped("", 9).as_str(), wrapped("incomparably", 4).as_str()), ("", "incomparably"));
        let line = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_string()).collect::<Vec<_>>();
        let lines = [line(&["ddp", "1.0", "20"]), line(&["fsdp", "10.0", "-"])];
        assert_eq!(grid(&line(&["", "lan", "wan"]), &lines), "       lan  wan\nddp    1.0   20\nfsdp  10.0    -");
    }

    #[test]
    fn spreads_of_something_and_of_nothing() {
        assert_eq!(spread(&[3.0, 1.0, 2.0], 1), "2.0 (1.0-3.0)");
        assert_eq!((spread(&[], 1).as_str(), middle(&[], 1).as_str(), ratio(None).as_str()), ("-", "-", "-"));
        assert_eq!(ratio(Ratio::of(&[1.0, 3.0], &[2.0, 2.0])), "1.00 (0.50-1.50)");
    }
}
