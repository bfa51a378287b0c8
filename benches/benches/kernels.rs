//! Every case of `tallow-kernels` under criterion. The rate it calls elements is that of
//! floating-point operations, or of bytes.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::time::Duration;
use tallow_bench::{
    cases::{Unit, cases},
    ours,
};

fn kernels(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("kernels");
    group.sample_size(10).warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_secs(1));
    for case in cases(false) {
        group.throughput(match case.unit {
            Unit::Flop => Throughput::Elements(case.amount),
            Unit::Byte => Throughput::Bytes(case.amount),
        });
        group.bench_function(BenchmarkId::from_parameter(&case.name), |bencher| {
            // Made only for the cases that the filter lets through.
            let mut work = ours::work(&case).expect("every case has its work");
            bencher.iter(|| work.run());
        });
    }
    group.finish();
}

criterion_group!(all, kernels);
criterion_main!(all);
