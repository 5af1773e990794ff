"""`benchmarks.ccl --sweep`: all our variants over programs and blocks, against the one that the plan takes."""

from iris_tp.bench import timing

from benchmarks.cases.ccl_case import COPIES, Case, Contender, Ours

MIB = 1 << 20
PROGRAMS = (8, 16, 32, 64, 132)
BLOCKS = {"lamport": (256, 512, 1024, 2048), "flags": (2048, 8192, 16384)}
BRIEF = timing.Budget(batch_ms=0.5, longest_ms=4.0, measure_ms=4.0, calls=(4, 20), repeats=(2, 3))


def sweep(case: Case, ours: Ours, row: dict) -> None:
    """Time every variant of ours with every number of programs and every block, as graphs; check each."""
    from iris.ccl import Config

    team = case.team
    variants = [("two_shot", "lamport"), ("two_shot", "flags")]
    if case.op == "all_reduce":
        variants.insert(0, ("one_shot", "lamport"))
    configs = {"as planned": None}
    for variant, protocol in variants:
        # among two ranks one shot sends no more than two
        most = MIB if variant == "one_shot" and team.world > 2 else 64 * MIB
        if protocol == "lamport" and case.nbytes > most:
            continue
        for block in BLOCKS[protocol] if team.cuda else (2048,):
            for programs in PROGRAMS if team.cuda else (1,):
                reduce = dict(all_reduce_variant=variant) if case.op == "all_reduce" else {}
                config = Config(1, block, comm_sms=programs, protocol=protocol, **reduce)
                configs[f"{variant} {protocol} {programs} x {block}"] = config
    known = set()
    for name, config in configs.items():
        plan = ours.plan(case, config)
        launched = tuple(plan[key] for key in ("variant", "protocol", "block", "programs"))
        if config is not None and (launched in known or plan["programs"] < config.comm_sms // 2):
            continue  # fewer units than programs: measured with fewer already
        known.add(launched)
        result = {"name": name, "kind": "ours", "status": "ok", "notes": [], "plan": plan}
        row["results"].append(result)
        call = ours.call(case, config)
        contender = Contender(name, "ours", lambda case: None, lambda case: True)
        error, reason = team.attempt(lambda contender=contender, call=call: case.check(contender, call))
        if reason or team.slowest([error])[0] > 1:
            result.update(status="WRONG", notes=[reason or f"{error:.3g} times the allowed error"])
            continue
        estimate = team.slowest([timing.estimate_us(team, call, COPIES)])[0]
        budget = BRIEF if team.cuda else timing.INTERPRETED
        count = budget.calls_for(estimate, COPIES)
        if team.cuda:
            captured, reason = team.attempt(lambda call=call, count=count: timing.graph_batch(call, count, COPIES))
            if reason:
                result.update(status="n/a", notes=[reason])
                continue
            batch = captured[0]
        else:
            batch = timing.eager_batch(call, count, COPIES)
        taken, _ = timing.interleave(team, {name: batch}, budget.repeats_for(estimate * count, 1))
        if name in taken:
            result["graph_us" if team.cuda else "eager_us"] = taken[name].call_us
