//! The predicted times against the measured ones.

use std::error::Error;
use std::ops::Range;

use hsdp_simulator::Time;
use plotters::coord::combinators::LogCoord;
use plotters::prelude::*;

use crate::tables::Held;

/// Of the machines, in their order.
const COLORS: [RGBColor; 2] = [BLUE, RED];
/// Errors between which the lines beside the diagonal are.
const BAND: f64 = 0.1;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<LogCoord<f64>, LogCoord<f64>>>;

/// Draws the steps of all machines, as SVG.
pub(crate) fn draw(held: &[Held]) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    draw_into(&mut svg, held)?;
    Ok(svg)
}

fn draw_into(svg: &mut String, held: &[Held]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, (640, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let range = range(held);
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .caption("steps that no machine was fitted to", ("sans-serif", 13))
        .x_label_area_size(36)
        .y_label_area_size(60)
        .build_cartesian_2d(range.clone().log_scale(), range.clone().log_scale())?;
    chart
        .configure_mesh()
        .x_labels(5)
        .y_labels(5)
        .x_desc("measured, ms")
        .y_desc("predicted, ms")
        .x_label_formatter(&|ms| format!("{ms:.0}"))
        .y_label_formatter(&|ms| format!("{ms:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    draw_band(&mut chart, &range)?;
    draw_steps(&mut chart, held)?;
    area.present()?;
    Ok(())
}

/// The times of both axes, with room around them.
fn range(held: &[Held]) -> Range<f64> {
    let times = held.iter().flat_map(|held| &held.steps).map(|(_, (_, measured))| ms(*measured));
    let (least, most) = times.fold((f64::MAX, 0.0_f64), |(a, b), it| (a.min(it), b.max(it)));
    least / 1.5..most * 1.5
}

/// The diagonal, and the errors beside it.
fn draw_band(chart: &mut Chart<'_, '_>, range: &Range<f64>) -> Result<(), Box<dyn Error>> {
    for (factor, opacity) in [(1.0, 0.7), (1.0 - BAND, 0.25), (1.0 + BAND, 0.25)] {
        // Within the picture: lines that leave it are cut off with a bend.
        let ends = [range.start.max(range.start / factor), range.end.min(range.end / factor)];
        chart.draw_series(LineSeries::new(ends.map(|it| (it, it * factor)), BLACK.mix(opacity)))?;
    }
    Ok(())
}

fn draw_steps<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>, held: &[Held]) -> Result<(), Box<dyn Error>> {
    for (held, color) in held.iter().zip(COLORS) {
        let points =
            held.steps.iter().map(|(_, (predicted, measured))| (ms(*measured), ms(*predicted)));
        let marks = points.map(|point| Circle::new(point, 3, color.mix(0.6).filled()));
        let count = held.steps.len();
        let mean = 100.0 * held.errors().mean();
        chart
            .draw_series(marks)?
            .label(format!("{}: {count} steps, mean error {mean:.1} %", held.name))
            .legend(move |(x, y)| Circle::new((x + 9, y), 3, color.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .border_style(TRANSPARENT)
        .draw()?;
    Ok(())
}

fn ms(time: Time) -> f64 {
    1e3 * time.seconds()
}
