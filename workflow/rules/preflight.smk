# Nodes, network and disks, before anything is started.
rule preflight:
    output:
        verdict=report(
            RUN.preflight.verdict,
            caption="../report/preflight.rst",
            category="1 Preflight",
            labels={"result": "verdict"},
        ),
        bad_nodes=RUN.preflight.bad_nodes,
        ran=RUN.preflight.ran,
    log:
        LOGS / "preflight.log",
    conda:
        "../envs/shakedown.yaml"
    resources:
        **placement(),
        nodes=preflight_nodes(),
        gpu=CONFIG.cluster.gpus_per_node * preflight_nodes(),
        exclude_file=str(RUN.excluded_nodes),
    params:
        section=section("cluster", "preflight"),
        out=RUN.preflight.root,
        config=RUN.config,
    shell:
        # A verdict that is not good must survive: the gate below fails, not this job.
        "{{ shakedown preflight --config {params.config:q} --out {params.out:q} "
        "|| [ -s {output.verdict:q} ]; }} 2>&1 | tee {log:q}; touch {output.ran:q}"


rule accept_preflight:
    input:
        verdict=rules.preflight.output.verdict,
        ran=rules.preflight.output.ran,
    output:
        RUN.preflight.accepted,
    log:
        LOGS / "accept_preflight.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    shell:
        "shakedown accept {input.verdict:q} --remove-on-fail {input.ran:q} --out {output:q} 2>&1 | tee {log:q}"
