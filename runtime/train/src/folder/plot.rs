//! Plots of the loss and of the updates of each parameter.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use hsdp::Norms;
use plotters::coord::Shift;
use plotters::coord::ranged1d::BoldPoints;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::StepRecord;
use crate::failure::Failure;
use crate::file::replace_with;
use crate::stderr::in_one_line;

/// Draws the loss of every step into an SVG file.
pub(crate) fn loss(file: &Path, records: &[StepRecord], loss: &str) -> Result<(), Failure> {
    write_svg(file, |text| draw(text, records, loss))
}

/// Draws a picture, and writes it as one complete file.
fn write_svg(
    file: &Path,
    draw: impl FnOnce(&mut String) -> Result<(), Box<dyn Error>>,
) -> Result<(), Failure> {
    let mut text = String::new();
    draw(&mut text)
        .map_err(|error| Failure::work(format!("cannot draw {}: {error}", file.display())))?;
    replace_with(file, |sink| sink.write_all(text.as_bytes()))
        .map_err(|error| Failure::work(format!("cannot write {error}")).in_training())
}

fn draw(text: &mut String, records: &[StepRecord], loss: &str) -> Result<(), Box<dyn Error>> {
    let points: Vec<(f64, f64)> = records
        .iter()
        .filter(|record| record.loss.is_finite())
        .map(|record| (record.step as f64, record.loss))
        .collect();
    let [steps, losses] = axes(&points);
    let marks = RangedCoordf64::from(losses.clone()).key_points(BoldPoints(LOSSES));
    let area = SVGBackend::with_string(text, (800, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .caption("Loss of each step", ("sans-serif", 20))
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(steps, losses)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc(loss)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_labels(LOSSES)
        .y_label_formatter(&|loss| label(*loss, &marks))
        .light_line_style(TRANSPARENT)
        .draw()?;
    chart.draw_series(LineSeries::new(points, BLUE.stroke_width(2)))?;
    area.present()?;
    Ok(())
}

/// Maximum number of labels on the axis of the losses.
const LOSSES: usize = 11;

/// Returns the label of a mark on an axis, with as many digits as the distance of `marks` needs.
fn label(value: f64, marks: &[f64]) -> String {
    let distance = marks.windows(2).map(|pair| pair[1] - pair[0]).fold(1.0, f64::min);
    let shows = |digits: &i32| {
        let scaled = distance * 10_f64.powi(*digits);
        (scaled - scaled.round()).abs() < 0.01 * scaled
    };
    match (1..=5).find(shows) {
        Some(digits) => format!("{value:.digits$}", digits = digits.unsigned_abs() as usize),
        None => format!("{value:.2e}"),
    }
}

/// Returns the ranges of the steps and of the losses. Neither range is empty. The losses' range
/// begins at 0 if all losses are positive.
fn axes(points: &[(f64, f64)]) -> [Range<f64>; 2] {
    let ends = |values: &mut dyn Iterator<Item = f64>| {
        let none = (f64::INFINITY, f64::NEG_INFINITY);
        let (least, most) = values.fold(none, |(least, most), it| (least.min(it), most.max(it)));
        if least <= most { (least, most) } else { (0.0, 0.0) }
    };
    let (first, last) = ends(&mut points.iter().map(|(step, _)| *step));
    let (lowest, highest) = ends(&mut points.iter().map(|(_, loss)| *loss));
    let lowest = if lowest > 0.0 { 0.0 } else { lowest };
    let margin = match (highest - lowest) * 0.05 {
        0.0 => highest.abs().max(1.0),
        margin => margin,
    };
    let bottom = if lowest < 0.0 { lowest - margin } else { 0.0 };
    [first..last.max(first + 1.0), bottom..highest + margin]
}

/// Sizes in pixels: the width of the names and of the cells of all steps, the height of a row, and
/// the margins above and below the rows.
const NAMES: i32 = 250;
const CELLS: usize = 560;
const ROW: usize = 14;
const TOP: i32 = 64;
const BOTTOM: i32 = 40;

/// Maximum number of cells. A browser shows this many without trouble.
const MOST_CELLS: usize = 50_000;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Returns the maximum number of steps that [`updates`] draws for `rows` parameters.
pub(crate) fn most_columns(rows: usize) -> usize {
    (MOST_CELLS / rows.max(1)).clamp(1, CELLS / 2)
}

/// Draws the ratios of updates to parameters into an SVG file, with a row for each parameter and a
/// column for each step.
pub(crate) fn updates(file: &Path, steps: &[(u64, Norms)]) -> Result<(), Failure> {
    write_svg(file, |text| draw_updates(text, steps))
}

fn draw_updates(svg: &mut String, columns: &[(u64, Norms)]) -> Result<(), Box<dyn Error>> {
    let names: Vec<&str> = columns[0].1.iter().map(|(name, _)| name).collect();
    let top = |row: usize| TOP + pixels(ROW * row);
    let edge = |column: usize| NAMES + pixels(CELLS * column / columns.len());
    let right = edge(columns.len());
    let bottom = top(names.len());
    let size = (right.unsigned_abs() + 24, (bottom + BOTTOM).unsigned_abs());
    let area = SVGBackend::with_string(svg, size).into_drawing_area();
    area.fill(&WHITE)?;
    let scale = RatioScale::of(columns);
    write(&area, "Change of each parameter in a step, over the parameter", 16, 26, 20, HPos::Left)?;
    scale.draw(&area)?;
    for (row, name) in names.iter().enumerate() {
        write(
            &area,
            &in_one_line(name),
            NAMES - 8,
            (top(row) + top(row + 1)) / 2,
            11,
            HPos::Right,
        )?;
    }
    for (column, (_, ratios)) in columns.iter().enumerate() {
        for (row, (_, ratio)) in ratios.iter().enumerate() {
            let Some(color) = scale.color(*ratio) else { continue };
            let corners = [(edge(column), top(row)), (edge(column + 1), top(row + 1) - 1)];
            area.draw(&Rectangle::new(corners, color.filled()))?;
        }
    }
    let [first, last] = [columns[0].0, columns[columns.len() - 1].0];
    write(&area, &format!("step {first}"), NAMES, bottom + 16, 12, HPos::Left)?;
    write(&area, &format!("step {last}"), right, bottom + 16, 12, HPos::Right)?;
    area.present()?;
    Ok(())
}

fn pixels(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX / 2)
}

fn write(
    area: &Area<'_>,
    text: &str,
    x: i32,
    y: i32,
    size: i32,
    side: HPos,
) -> Result<(), Box<dyn Error>> {
    let style = ("sans-serif", size).into_text_style(area).pos(Pos::new(side, VPos::Center));
    Ok(area.draw_text(text, &style, (x, y))?)
}

/// Colors from pale to dark blue, between the smallest and the largest power of ten.
struct RatioScale {
    least: i32,
    most: i32,
}

impl RatioScale {
    #[expect(clippy::cast_possible_truncation, reason = "exponents of f64 are small")]
    fn of(columns: &[(u64, Norms)]) -> Self {
        let ratios = columns.iter().flat_map(|(_, ratios)| ratios.iter().map(|(_, ratio)| *ratio));
        let exponents = ratios.filter(|it| is_drawn(*it)).map(f64::log10);
        let (least, most) =
            exponents.fold((f64::MAX, f64::MIN), |(least, most), it| (least.min(it), most.max(it)));
        // No parameter was changed.
        if least > most {
            return Self { least: -1, most: 0 };
        }
        let least = least.floor() as i32;
        Self { least, most: (most.ceil() as i32).max(least + 1) }
    }

    /// Returns the color of a ratio. `None` for a parameter that was not updated, or was zero.
    fn color(&self, ratio: f64) -> Option<RGBColor> {
        let span = f64::from(self.most - self.least);
        is_drawn(ratio).then(|| shade((ratio.log10() - f64::from(self.least)) / span))
    }

    fn draw(&self, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
        let y = TOP - 16;
        for part in 0..100 {
            let corners = [(NAMES + part, y - 5), (NAMES + part + 1, y + 5)];
            let color = shade(f64::from(part) / 99.0);
            area.draw(&Rectangle::new(corners, color.filled()))?;
        }
        write(area, &format!("1e{}", self.least), NAMES - 8, y, 12, HPos::Right)?;
        let rest = format!("1e{}; white: no update, or of a parameter that was zero", self.most);
        write(area, &rest, NAMES + 108, y, 12, HPos::Left)
    }
}

fn is_drawn(ratio: f64) -> bool {
    ratio > 0.0 && ratio.is_finite()
}

/// Returns a color between pale blue at 0 and dark blue at 1.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "colors from 0 to 255")]
fn shade(at: f64) -> RGBColor {
    let between = |pale: f64, dark: f64| (pale + (dark - pale) * at.clamp(0.0, 1.0)) as u8;
    RGBColor(between(222.0, 8.0), between(235.0, 48.0), between(247.0, 107.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, loss: f64) -> StepRecord {
        StepRecord { step, loss, grad_norm: 1.0, tokens: 1, seconds: 1.0, applied: true }
    }

    #[test]
    fn the_axes_have_all_steps_and_finite_losses() {
        for (points, expected) in [
            (&[(0.0, 2.0), (9.0, 1.0)][..], [0.0..9.0, 0.0..2.1]),
            (&[(500.0, 2.0), (700.0, 2.0)], [500.0..700.0, 0.0..2.1]),
            (&[(3.0, -4.0), (5.0, -2.0)], [3.0..5.0, -4.1..-1.9]),
            (&[(3.0, -4.0)], [3.0..4.0, -8.0..0.0]),
            (&[(3.0, 0.0)], [3.0..4.0, 0.0..1.0]),
            (&[], [0.0..1.0, 0.0..1.0]),
        ] {
            for (axis, expected) in axes(points).into_iter().zip(expected) {
                let differs = |one: f64, other: f64| (one - other).abs() > 1e-9;
                let wrong = differs(axis.start, expected.start) || differs(axis.end, expected.end);
                assert!(!wrong, "{points:?}: {axis:?}, not {expected:?}");
            }
        }
    }

    #[test]
    fn labels_of_small_losses_differ() {
        let folder = tempfile::TempDir::new().expect("a folder");
        let file = folder.path().join("loss.svg");
        let labels = |losses: [f64; 2]| {
            let records: Vec<_> = (0..).zip(losses).map(|(step, it)| record(step, it)).collect();
            loss(&file, &records, "loss").expect("it is drawn");
            let svg = std::fs::read_to_string(&file).expect("a file");
            let texts = svg.lines().map(str::trim).filter(|it| it.contains('.'));
            let labels = texts.filter(|it| it.parse::<f64>().is_ok());
            labels.map(str::to_owned).collect::<Vec<_>>()
        };
        let of_a_model = ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0", "3.5", "4.0"];
        let ends = |labels: Vec<String>| [labels[0].clone(), labels[labels.len() - 1].clone()];
        assert_eq!(labels([4.2, 2.0]), of_a_model);
        assert_eq!(ends(labels([0.1, 0.02])), ["0.00", "0.10"]);
        assert_eq!(ends(labels([0.004, 0.002])), ["0.0000", "0.0040"]);
        assert_eq!(ends(labels([3e-7, 2e-7])), ["0.00e0", "3.00e-7"]);
        for losses in [[0.1, 0.02], [0.03, 0.01], [0.004, 0.002], [3e-7, 2e-7], [-1.0, -0.999]] {
            let mut labels = labels(losses);
            let count = labels.len();
            assert!(count > 4, "{labels:?}");
            labels.dedup();
            assert_eq!(labels.len(), count, "{labels:?}");
        }
    }

    #[test]
    fn a_loss_after_a_resume_fills_the_width_and_may_be_infinite_or_negative() {
        let folder = tempfile::TempDir::new().expect("a folder");
        let file = folder.path().join("loss.svg");
        let x_of_line = |records: &[StepRecord]| {
            loss(&file, records, "loss").expect("it is drawn");
            let svg = std::fs::read_to_string(&file).expect("a file");
            let (_, line) = svg.rsplit_once("points=\"").expect("a line");
            let (line, _) = line.split_once('"').expect("its end");
            let x = line.split_whitespace().map(|point| point.split_once(',').expect("a point").0);
            x.map(|x| x.parse().expect("a number")).collect::<Vec<i32>>()
        };
        let losses = [-1.0, f64::NAN, f64::INFINITY, -2.0, -3.0];
        let records: Vec<_> = (1000..).zip(losses).map(|(step, loss)| record(step, loss)).collect();
        let x = x_of_line(&records);
        assert_eq!(x.len(), 3, "{x:?}");
        assert!(x[2] - x[0] > 600 && x[1] > x[0] + 400, "{x:?}");
        x_of_line(&records[1..2]);
    }
}
