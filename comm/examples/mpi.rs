//! Ranks as processes: `mpirun -n 4 cargo run -p hsdp-comm --features mpi --example mpi`.

use std::time::{Duration, Instant};

use hsdp_comm::mpi::Job;
use hsdp_comm::{Channel, Reduction, Tag, WorldOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let job = Job::join(Duration::from_secs(30))?;
    let world = job.world(job.size(), WorldOptions::default())?.expect("all are in");
    let group = world.world_group(Channel::User);
    for len in [1usize, 1000, 1 << 20] {
        let mut best = f64::MAX;
        for _ in 0..20 {
            let values = vec![world.rank().index() as f32; len];
            let t = Instant::now();
            let sum = group.all_reduce(Tag::default(), Reduction::Sum, values)?.wait()?;
            best = best.min(t.elapsed().as_secs_f64());
            let n = job.size();
            assert!(sum.iter().all(|it| *it == (n * (n - 1) / 2) as f32));
        }
        if world.rank().index() == 0 { println!("{len}: {:.1} us", best * 1e6); }
    }
    Ok(())
}
