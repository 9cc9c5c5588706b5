//! The times as a picture: operations on the left, exchanges on the right.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::report::{Point, Report};

/// Of threads, messages and NCCL.
const COLORS: [RGBColor; 3] = [BLUE, RED, RGBColor(0, 130, 60)];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Lines with their names, and the unit of their times.
struct Half<'a> {
    title: &'a str,
    unit: (&'a str, f64),
    lines: Vec<(&'a str, &'a [Point])>,
}

/// Draws all times against the number of ranks, on logarithmic scales, as SVG.
pub(crate) fn draw(report: &Report) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    draw_into(&mut svg, report)?;
    Ok(svg)
}

fn draw_into(svg: &mut String, report: &Report) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, (960, 400)).into_drawing_area();
    area.fill(&WHITE)?;
    let operations = report.operations().into_iter().filter(|(_, points)| !points.is_empty());
    let halves = [
        Half {
            title: "CPU time of an operation on one rank",
            unit: ("us", 1e6),
            lines: operations.collect(),
        },
        Half {
            title: "an exchange of 64 bytes of all ranks",
            unit: ("ms", 1e3),
            lines: vec![("control plane", &report.exchanges)],
        },
    ];
    for (area, half) in area.split_evenly((1, 2)).iter().zip(halves) {
        draw_half(area, &half)?;
    }
    area.present()?;
    Ok(())
}

fn draw_half(area: &Area<'_>, half: &Half<'_>) -> Result<(), Box<dyn Error>> {
    let (unit, scale) = half.unit;
    let all = || half.lines.iter().flat_map(|(_, points)| *points);
    let Some(most) = all().map(|point| point.ranks).max() else { return Ok(()) };
    let times = || all().map(|point| point.seconds * scale);
    let least = times().fold(f64::MAX, f64::min);
    let longest = times().fold(0.0, f64::max);
    let x = (3.0..most as f64 * 1.3).log_scale();
    let y = (least / 2.0..longest * 2.0).log_scale();
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(half.title, ("sans-serif", 13))
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .x_desc("ranks")
        .y_desc(unit)
        .x_label_formatter(&|ranks| format!("{ranks:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for ((name, points), color) in half.lines.iter().zip(COLORS) {
        let points: Vec<_> =
            points.iter().map(|it| (it.ranks as f64, it.seconds * scale)).collect();
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, color.filled())))?;
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .border_style(TRANSPARENT)
        .draw()?;
    Ok(())
}
