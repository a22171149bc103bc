//! Tables and paragraphs for a terminal.

/// Width of a paragraph.
const COLUMNS: usize = 110;

/// Lines under a header, columns aligned: the first `names` to the left, the others to the right.
pub(super) fn table(header: &[&str], lines: &[Vec<String>], names: usize) -> String {
    let mut widths: Vec<usize> = header.iter().map(|name| name.chars().count()).collect();
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let join = |cells: &mut dyn Iterator<Item = &str>| {
        let columns: Vec<String> = cells
            .zip(&widths)
            .enumerate()
            .map(
                |(index, (cell, width))| {
                    if index < names { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        columns.join("  ").trim_end().to_string()
    };
    let mut text = vec![join(&mut header.iter().copied())];
    text.extend(lines.iter().map(|line| join(&mut line.iter().map(String::as_str))));
    text.join("\n")
}

/// A paragraph, broken between words.
pub(super) fn paragraph(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > 0 && line + 1 + word.chars().count() > COLUMNS {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.join("\n")
}

/// A number, or a dash where there is none.
pub(super) fn number(value: Option<f64>, digits: usize) -> String {
    value.filter(|value| value.is_finite()).map_or("-".into(), |value| format!("{value:.digits$}"))
}

/// Equal values once, others each, with a slash between.
pub(super) fn by_rank(values: impl Iterator<Item = String>) -> String {
    let values: Vec<String> = values.collect();
    match values.first() {
        Some(first) if values.iter().all(|value| value == first) => first.clone(),
        Some(_) => values.join("/"),
        None => "-".into(),
    }
}

/// `1.70x`.
pub(super) fn times(ratio: f64) -> String {
    format!("{ratio:.2}x")
}

/// What [`verdict`] says of speeds that it does not tell apart.
pub(super) const UNDECIDED: &str = "no difference was found";

/// What may be said of two speeds, of which each is known with its quartiles: a difference is one only where these do not overlap.
pub(super) fn verdict(ratio: f64, of: (f64, f64), over: (f64, f64)) -> &'static str {
    let overlap = of.0 <= over.1 && over.0 <= of.1;
    match ratio {
        _ if overlap => UNDECIDED,
        ratio if ratio > 1.0 => "faster",
        _ => "slower",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let text = table(&["name", "ms"], &[vec!["a".into(), "100".into()], vec!["longer".into(), "5".into()]], 1);
        assert_eq!(text, "name     ms\na       100\nlonger    5");
    }

    #[test]
    fn paragraphs_break_between_words_and_lose_none() {
        let words = vec!["word"; 60].join(" ");
        let broken = paragraph(&words);
        assert!(broken.lines().all(|line| line.len() <= COLUMNS) && broken.lines().count() > 1);
        assert_eq!(broken.split_whitespace().collect::<Vec<_>>().join(" "), words);
    }

    #[test]
    fn values_of_ranks_are_told_once_where_they_agree() {
        assert_eq!(by_rank(["1".to_string(), "1".to_string()].into_iter()), "1");
        assert_eq!(by_rank(["1".to_string(), "2".to_string()].into_iter()), "1/2");
        assert_eq!(number(Some(f64::NAN), 1), "-");
    }

    #[test]
    fn speeds_differ_where_their_quartiles_do_not_overlap() {
        assert_eq!(verdict(1.7, (160.0, 180.0), (95.0, 105.0)), "faster");
        assert_eq!(verdict(0.5, (45.0, 55.0), (95.0, 105.0)), "slower");
        assert_eq!(verdict(1.1, (100.0, 120.0), (90.0, 101.0)), "no difference was found");
    }
}
