use super::*;

#[test]
fn dropped_descriptors_are_forgotten() {
    let mut observers = Observers::default();
    let kept = Arc::new(Readiness::new().unwrap());
    for _ in 0..3 {
        observers.add(&Arc::new(Readiness::new().unwrap()));
        observers.add(&kept);
    }
    assert_eq!(observers.readiness.len(), 3);
}
