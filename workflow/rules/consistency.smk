# The same tokens scored by transformers and by the inference engine.
rule consistency:
    input:
        # After the agents: the server has then been seen to work under load.
        RUN.agents / "accepted.json",
        endpoint=RUN.endpoint(SERVER),
        assets=RUN.assets / "assets.json",
    output:
        verdict=RUN.consistency / "verdict.json",
        page=report(
            RUN.consistency / "report.html",
            caption="../report/consistency.rst",
            category="3 Consistency",
            labels={"result": "token comparison"},
        ),
        ran=RUN.consistency / "ran",
    log:
        LOGS / "consistency.log",
    conda:
        "../envs/shakedown.yaml"
    resources:
        **placement(),
        exclude=bad_nodes,
    params:
        section=section("consistency", "serve", "model", "data", "seed"),
        out=RUN.consistency,
        config=RUN.config,
    shell:
        "{{ shakedown compare --config {params.config} --endpoint {input.endpoint} "
        "--out {params.out} "
        "|| [ -s {output.verdict} ]; }} 2>&1 | tee {log}; touch {output.ran} {output.page}"


rule accept_consistency:
    input:
        verdict=rules.consistency.output.verdict,
        ran=rules.consistency.output.ran,
    output:
        RUN.consistency / "accepted.json",
    log:
        LOGS / "accept_consistency.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    shell:
        "shakedown accept {input.verdict} --ticket {input.ran} --out {output} 2>&1 | tee {log}"
